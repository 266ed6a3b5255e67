"""Speed and peak memory of a GRPO iteration on a real model: this project against TRL, in processes that take turns.

Both start from the same model folder and the same 8 prompts, sample 8 answers to each at temperature 1, judge them by
the same Python function, and make one AdamW step of all weights in float32, without a KL penalty or clipping of
gradients. TRL's update is measured in passes of several sizes, and in the leanest way, pass by pass with gradient
checkpointing; ours at its own default.

TRL runs in an environment of its own:

    python3 -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.16.0
    python benchmarks/peers/compare_grpo.py --peer-python peer/bin/python --model recipes/smollm2/model
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from compare import HERE, Result, run
from grpo_inputs import SUBJECTS, write_prompts


def commands(options: argparse.Namespace, inputs: Path) -> dict[str, list[str]]:
    """Side -> the command that measures it; ours is the first."""
    work = ["--model", str(options.model), "--inputs", str(inputs), "--samples", str(options.samples)]
    work += ["--new-tokens", str(options.new_tokens), "--iterations", str(options.iterations)]
    sides = {"rlhf": [sys.executable, str(HERE / "run_rlhf_grpo.py"), *work]}
    if options.micro_batch_tokens is not None:
        sides["rlhf"] += ["--micro-batch-tokens", str(options.micro_batch_tokens)]
    theirs = [options.peer_python, str(HERE / "run_trl_grpo.py"), *work]
    for size in options.micro_batches:
        sides[f"TRL, {size} a pass"] = [*theirs, "--micro-batch", str(size)]
    for size in options.lean_micro_batches:
        sides[f"TRL, {size} a pass, checkpointing"] = [*theirs, "--micro-batch", str(size), "--gradient-checkpointing"]
    return sides


def report(found: Mapping[str, list[Result]]) -> None:
    """A line for each side (medians over all its iterations, its highest memory), then what ours is of TRL's."""
    seconds = {side: statistics.median(s for each in runs for s in each["seconds"]) for side, runs in found.items()}
    peaks = {side: max(each["peak_bytes"] for each in runs) for side, runs in found.items()}
    print("| side | seconds an iteration | generated tokens | of them a second | peak GB |\n|---|---|---|---|---|")
    for side, runs in found.items():
        tokens = statistics.mean(count for each in runs for count in each["tokens"])
        rate = tokens / seconds[side]
        print(f"| {side} | {seconds[side]:.2f} | {tokens:.0f} | {rate:.1f} | {peaks[side] / 1e9:.2f} |")
    ours, *theirs = found
    if theirs:
        best, leanest = min(theirs, key=seconds.__getitem__), min(theirs, key=peaks.__getitem__)
        print(f"speed: {seconds[best] / seconds[ours]:.2f}x that of TRL at its best ({best})")
        print(f"peak: {peaks[ours] / peaks[best]:.2f}x of TRL's there")
        print(f"peak: {peaks[ours] / peaks[leanest]:.2f}x of TRL's leanest ({leanest})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of the environment that holds TRL")
    parser.add_argument("--model", type=Path, required=True, help="a model folder with a chat template")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--new-tokens", type=int, default=24, help="of an answer, at most")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[64, 16, 8, 4], help="answers in TRL's passes")
    parser.add_argument("--lean-micro-batches", type=int, nargs="*", default=[1], help="with gradient checkpointing")
    parser.add_argument("--micro-batch-tokens", type=int, help="bound of our passes; default: the framework's own")
    parser.add_argument("--iterations", type=int, default=3, help="measured in each process, after one of warm-up")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {options.threads} threads, {options.model.name}: {len(SUBJECTS)} prompts x "
        f"{options.samples} answers of at most {options.new_tokens} tokens",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder))
        sides = commands(options, Path(folder))
        found: dict[str, list[Result]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, command in sides.items():
                found[side].append(run(command, options.threads))
                print(f"{side}: {found[side][-1]}", file=sys.stderr, flush=True)
    report(found)


if __name__ == "__main__":
    main()
