"""Time until a run ends after one of its ranks is killed or frozen, at most `strategy.timeout_seconds` + 5 s.

Two processes train with `ddp`. One of them gets SIGKILL or SIGSTOP between two lines of `metrics.jsonl`. Exits with 1
above the bound, which holds on an idle machine.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from rlhf_testing.runs import tiny_run

RLHF = str(Path(sys.executable).parent / "rlhf")
GRACE_SECONDS = 5.0
PATIENCE_SECONDS = 300.0


def wait_for_lines(path: Path, number: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (path.exists() and path.read_bytes().count(b"\n") >= number):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE_SECONDS:g} s for line {number} of {path}")
        time.sleep(0.02)


def rank_of(launcher: psutil.Process, rank: int) -> psutil.Process:
    """Find the child process of `launcher` with this rank."""
    for process in launcher.children(recursive=True):
        if "launched" in " ".join(process.cmdline()) and process.environ().get("RANK") == str(rank):
            return process
    raise SystemExit(f"no process has rank {rank}")


def seconds_until_the_end(number: signal.Signals, rank: int, timeout_seconds: float) -> tuple[float, int, str]:
    """Seconds from the signal to the command's end, its exit code, and the first line of its error."""
    run = tiny_run({"train": {"episodes": 10_000}, "strategy": {"name": "ddp", "timeout_seconds": timeout_seconds}})
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "run.yaml", Path(folder) / "run"
        file.write_text(yaml.safe_dump(run), encoding="utf-8")
        command = [RLHF, "train", str(file), "--num-processes", "2", "--output", str(output), "--quiet"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_for_lines(output / "metrics.jsonl", 4)
        struck = rank_of(psutil.Process(process.pid), rank)
        started = time.monotonic()
        struck.send_signal(number)
        _, told = process.communicate(timeout=PATIENCE_SECONDS)
        seconds = time.monotonic() - started
        errors = [line for line in told.splitlines() if line.startswith("error")]
        return seconds, process.returncode, errors[0] if errors else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout-seconds", type=float, default=8.0)
    options = parser.parse_args()
    bound = options.timeout_seconds + GRACE_SECONDS
    print(f"| signal | rank | seconds (at most {bound:g}) | exit code | error |\n|---|---|---|---|---|")
    longest = 0.0
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for rank in (0, 1):
            seconds, code, error = seconds_until_the_end(number, rank, options.timeout_seconds)
            longest = max(longest, seconds)
            print(f"| {number.name} | {rank} | {seconds:.1f} | {code} | {error} |", flush=True)
    return int(longest > bound)


if __name__ == "__main__":
    sys.exit(main())
