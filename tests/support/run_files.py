"""Helpers for tests of whole runs: reading a run folder without the values that differ between equal runs."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import yaml
from running import forked_ranks, run_rlhf

from rlhf_core import train
from rlhf_testing.runs import tiny_run

RLHF = str(Path(sys.executable).parent / "rlhf")
TIMES = ("time/", "memory/", "tokens_per_second/", "reward_calls/")


def start(changes, output, **options):
    """Run a tiny run in this process, or with `num_processes` in forked ones, and return its result."""
    with forked_ranks() if options.get("num_processes", 1) > 1 else nullcontext():
        return train(tiny_run(changes), output=output, **options)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder):
    """Return the lines of `metrics.jsonl` without times, memory and throughput."""
    return [
        {key: value for key, value in line.items() if not key.startswith(TIMES)}
        for line in lines(folder / "metrics.jsonl")
    ]


def samples(folder):
    return lines(folder / "samples.jsonl")


def write_run(folder, changes=None):
    """Write a tiny run as a run file."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tiny_run(changes)))
    return path


def command(*arguments, **options):
    """Run the command until it ends. Options: see `running.rlhf`."""
    return run_rlhf(*arguments, **options)


def tree(folder):
    """Return every path below `folder` with its contents, to detect changes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
