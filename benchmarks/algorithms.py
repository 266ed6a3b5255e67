"""Held-out accuracy of every algorithm on the quickstart task, in every placement, on several seeds, as a table.

Each cell is a separate run of the command. All runs of one seed start from one warm start. Finished runs are not
repeated: pass the folder of an interrupted table as `--output` to continue it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUN_TIMEOUT_SECONDS = 3600

ALGORITHMS = ("ppo", "grpo", "rloo", "reinforce++", "dpo", "reward-model")
PLACEMENTS = {
    "local": (),
    "ddp": ("--strategy", "ddp", "--num-processes", "2"),
    "ray": ("--transport", "ray"),
}


def accuracy(algorithm: str, folder: Path) -> float:
    """Accuracy of a finished run: greedy exact match on 1,000 held-out problems, or held-out pairs (reward model)."""
    if algorithm != "reward-model":
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return float(summary["eval_after"])
    last = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return float(last["eval/preference/accuracy"])


def is_done(folder: Path) -> bool:
    """Whether the folder contains a run that ended as expected."""
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "done"


def run(algorithm: str, placement: str, seed: int, episodes: int, root: Path) -> float:
    """Train, unless the run is already finished, and return the accuracy."""
    folder = root / f"{algorithm}-{placement}-{seed}"
    if not is_done(folder):
        shutil.rmtree(folder, ignore_errors=True)
        warm_start = root / f"warm-start-{seed}"
        if warm_start.exists():
            shutil.copytree(warm_start, folder / "warm-start")
        command = [str(Path(sys.executable).parent / "rlhf"), "train", "--algorithm", algorithm, "--quiet"]
        command += [*PLACEMENTS[placement], "--set", f"train.seed={seed}", "--set", f"train.episodes={episodes}"]
        command += ["--set", f"eval.every_episodes={episodes}", "--output", str(folder)]
        subprocess.run(command, check=True, timeout=RUN_TIMEOUT_SECONDS)
        if not warm_start.exists():
            shutil.copytree(folder / "warm-start", warm_start)
    return accuracy(algorithm, folder)


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Markdown table of algorithm x placement, with the accuracies of the seeds in each cell."""
    placements = list(next(iter(results.values())))
    lines = [f"| algorithm | {' | '.join(placements)} |", "|---" * (len(placements) + 1) + "|"]
    for algorithm, cells in results.items():
        values = [" ".join(f"{value:.3f}" for value in cells[placement]) for placement in placements]
        lines.append(f"| `{algorithm}` | {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--placements", nargs="+", choices=list(PLACEMENTS), default=list(PLACEMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=120, help="episodes per run")
    parser.add_argument("--output", type=Path, default=Path("runs") / f"algorithms-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    results = {
        algorithm: {
            placement: [run(algorithm, placement, seed, options.episodes, options.output) for seed in options.seeds]
            for placement in options.placements
        }
        for algorithm in options.algorithms
    }
    print(table(results))


if __name__ == "__main__":
    main()
