"""Common parts of the comparisons on a real model: options, sides that take turns, and the table of a run."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from compare import HERE, Result, run


def option_parser(
    description: str | None, micro_batches: Sequence[int], *, needs_model: bool = True
) -> argparse.ArgumentParser:
    """Options of every comparison on a real model. `micro_batches` are the default pass sizes of TRL's update."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of the environment with TRL")
    parser.add_argument("--model", type=Path, required=needs_model, help="model folder with a chat template")
    parser.add_argument(
        "--micro-batches", type=int, nargs="*", default=list(micro_batches), help="samples (or pairs) per pass of TRL"
    )
    parser.add_argument("--lean-micro-batches", type=int, nargs="*", default=[1], help="with gradient checkpointing")
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens per pass of ours, by default the framework's")
    parser.add_argument("--iterations", type=int, default=3, help="measured iterations per process, after warm-up")
    parser.add_argument("--rounds", type=int, default=1, help="number of processes per side")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser


def sides(options: argparse.Namespace, work: Sequence[str], ours: str, theirs: str) -> dict[str, list[str]]:
    """Commands that measure each side, ours first. `ours` and `theirs` are scripts in this folder."""
    common = [*work, "--iterations", str(options.iterations)]
    found = {"rlhf": [sys.executable, str(HERE / ours), *common]}
    if options.micro_batch_tokens is not None:
        found["rlhf"] += ["--micro-batch-tokens", str(options.micro_batch_tokens)]
    peer = [options.peer_python, str(HERE / theirs), *common]
    for size in options.micro_batches:
        found[f"TRL, {size} a pass"] = [*peer, "--micro-batch", str(size)]
    for size in options.lean_micro_batches:
        found[f"TRL, {size} a pass, checkpointing"] = [*peer, "--micro-batch", str(size), "--gradient-checkpointing"]
    return found


def compare(options: argparse.Namespace, commands: Mapping[str, Sequence[str]], work: str) -> dict[str, list[Result]]:
    """Run the sides in turn and print the results. `work` describes an iteration."""
    is_gpu = getattr(options, "device", "cpu") == "cuda"
    machine = torch.cuda.get_device_name() if is_gpu else platform.machine()
    print(f"{machine}, {options.threads} threads, {options.model.name}: {work}", flush=True)
    found: dict[str, list[Result]] = {side: [] for side in commands}
    for _ in range(options.rounds):
        for side, command in commands.items():
            found[side].append(run(command, options.threads))
            print(f"{side}: {found[side][-1]}", file=sys.stderr, flush=True)
    report(found)
    return found


def report(found: Mapping[str, list[Result]]) -> None:
    """Print a line for each side (medians over all its iterations, its peak memory), then ratios of ours to TRL's."""
    seconds = {side: statistics.median(s for each in runs for s in each["seconds"]) for side, runs in found.items()}
    peaks = {side: max(each["peak_bytes"] for each in runs) for side, runs in found.items()}
    print("| side | seconds an iteration | tokens | of them a second | peak GB |\n|---|---|---|---|---|")
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
