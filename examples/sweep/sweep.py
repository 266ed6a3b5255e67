"""Trains a run file with every combination of some options and seeds, and prints a table of the results.

    python examples/sweep/sweep.py RUN.yaml --grid optimizer.lr=1e-5,3e-5,1e-4 --seeds 3 --output runs/sweep

`--random 8` draws eight of the combinations. Started again, it continues: finished runs are read, not repeated, and an
interrupted one is resumed. Started once per GPU (`CUDA_VISIBLE_DEVICES=1 python …`), the processes share the runs.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import mean, stdev

from rlhf_core import train
from rlhf_core.runfolder import RunFolder
from rlhf_pages import RunFacts, read_run_config, read_run_facts


def combinations(grid: Sequence[str], number: int | None) -> list[tuple[str, ...]]:
    """Return the overrides (`key=value`) of each combination, or of `number` random ones, always the same."""
    values = [
        [f"{key}={value}" for value in texts.split(",")] for key, _, texts in (each.partition("=") for each in grid)
    ]
    every = list(itertools.product(*values))
    return every if number is None or number >= len(every) else random.Random(0).sample(every, number)


def facts_of(folder: Path) -> RunFacts:
    """Return status, scores and last metrics of a run, which may not exist yet."""
    run = RunFolder(folder)
    return read_run_facts(run, read_run_config(run))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all runs, one after the other, and print the table, best first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run file")
    parser.add_argument("--grid", action="append", required=True, metavar="KEY=A,B", help="an option and its values")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each combination (default: 3)")
    parser.add_argument("--random", type=int, metavar="N", help="N random combinations instead of all")
    parser.add_argument("--metric", default="eval/score", help="metric of the table (default: eval/score)")
    parser.add_argument("--output", type=Path, default=Path("runs/sweep"), help="folder of the run folders")
    options = parser.parse_args(arguments)
    table = []
    for overrides in combinations(options.grid, options.random):
        folders = [
            options.output / "-".join([*overrides, f"seed={seed}"]).replace("/", "_") for seed in range(options.seeds)
        ]
        for seed, folder in enumerate(folders):
            if facts_of(folder).status != "done" and not RunFolder(folder).is_in_use:  # by another process of the sweep
                train(options.run, output=folder, resume="auto", overrides=[*overrides, f"train.seed={seed}"])
        done = [facts for facts in map(facts_of, folders) if facts.status == "done"]
        is_score = options.metric == "eval/score"  # of the held-out prompts after training
        values = [facts.eval_after if is_score else facts.last.get(options.metric) for facts in done]
        scores = [value for value in values if value is not None]
        average, deviation = mean(scores) if scores else -inf, stdev(scores) if len(scores) > 1 else 0.0
        table.append((average, deviation, overrides, len(scores)))
    print(f"{options.metric:>12}  {'std':>8}  runs  options")
    for average, deviation, overrides, number in sorted(table, reverse=True):
        print(f"{average:12.4f}  {deviation:8.4f}  {number:4}  {' '.join(overrides)}")
    print(f"compare the curves: rlhf report {options.output}/*")


if __name__ == "__main__":
    main()
