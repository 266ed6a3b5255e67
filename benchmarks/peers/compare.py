"""Seconds and peak memory of a PPO iteration: this project compared with TRL, in processes that take turns.

Both start from the same files (`inputs.py`): a random Llama, a tokenizer, a reward model, and 32 prompts of 16 to 64
tokens. Both sample 64 tokens (or fewer, of geometric length, with --cases varied) at temperature 1, score them with the
reward model, run reference and critic, and make one AdamW step of policy and critic per epoch, without gradient
clipping and without gradient checkpointing.

TRL runs in its own environment:

    python3 -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.19.0 trl==1.12.0
    python benchmarks/peers/compare.py --peer-python peer/bin/python
    python benchmarks/peers/compare.py --peer-python peer/bin/python --device cuda --models 0.5B --precisions bf16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from inputs import SIZES, write_inputs

HERE = Path(__file__).parent
PROMPTS, NEW_TOKENS = 32, 64
DEADLINE_SECONDS = 1200
PEER_PRECISIONS = {"fp32": ["fp32"], "bf16": ["bf16", "bf16-weights"]}
"""TRL's precisions by ours. TRL's `bf16=True` only casts in the update, so users may also choose bfloat16 weights."""

Result = Mapping[str, Any]


def run(command: Sequence[str], threads: int) -> Result:
    """Run one process to its end and return the JSON of its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    result: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def commands(options: argparse.Namespace, inputs: Path, case: str, precision: str) -> dict[str, list[str]]:
    """Commands that measure each side."""
    work = ["--inputs", str(inputs), "--prompts", str(PROMPTS), "--new-tokens", str(NEW_TOKENS)]
    work += ["--iterations", str(options.iterations), "--epochs", str(options.epochs), "--device", options.device]
    ours = [sys.executable, str(HERE / "run_rlhf.py"), *work, "--precision", precision]
    if options.micro_batch_tokens is not None:
        ours += ["--micro-batch-tokens", str(options.micro_batch_tokens)]
    sides = {"rlhf": ours}
    for peer in PEER_PRECISIONS[precision]:
        theirs = [options.peer_python, str(HERE / "run_trl.py"), *work, "--precision", peer]
        theirs += ["--micro-batch", str(PROMPTS // options.peer_micro_batches)]
        sides[f"TRL {peer}"] = [*theirs, "--fixed"] if case == "fixed" else theirs
    return sides


def compare(options: argparse.Namespace, size: str, case: str, precision: str) -> None:
    """Print a line for each side: median seconds of all its iterations, its maximum memory, and ratios to ours."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), size, varied=case == "varied", num_prompts=PROMPTS)
        sides = commands(options, Path(folder), case, precision)
        found: dict[str, list[Result]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, command in sides.items():
                found[side].append(run(command, options.threads))
    seconds = {side: statistics.median(s for each in runs for s in each["seconds"]) for side, runs in found.items()}
    peaks = {side: max(each["peak_bytes"] for each in runs) for side, runs in found.items()}
    tokens = statistics.mean(count for each in found["rlhf"] for count in each["tokens"])
    for side in sides:
        remark = f"{tokens:.0f} tokens sampled"
        if side != "rlhf":
            remark = (
                f"{seconds[side] / seconds['rlhf']:.2f}x our time; ours has {peaks['rlhf'] / peaks[side]:.2f}x its peak"
            )
        case_name = f"{size} {case} {precision}"
        print(f"| {case_name} | {side} | {seconds[side]:.2f} | {peaks[side] / 1e9:.2f} | {remark} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of the environment with TRL")
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=["S", "M"])
    parser.add_argument("--cases", nargs="+", choices=["fixed", "varied"], default=["fixed", "varied"])
    parser.add_argument("--precisions", nargs="+", choices=list(PEER_PRECISIONS), default=["fp32"])
    parser.add_argument("--iterations", type=int, default=3, help="measured iterations per process, after warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="number of processes per side")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens per pass of ours, by default the framework's")
    parser.add_argument("--peer-micro-batches", type=int, default=1, help="gradient accumulation of TRL's update")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    machine = platform.machine() if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{machine}, {options.threads} threads, {PROMPTS} prompts, {NEW_TOKENS} new tokens at most")
    print("| case | side | seconds an iteration | peak GB | |\n|---|---|---|---|---|")
    for precision in options.precisions:
        for size in options.models:
            for case in options.cases:
                compare(options, size, case, precision)


if __name__ == "__main__":
    main()
