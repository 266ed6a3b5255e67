"""Start-up time of the command: `--help`, `plugins list` and `config check` of the quickstart.

Each is started as a new process and compared with the same interpreter importing nothing. Exits with 1 above a bound,
which holds on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from rlhf_testing.runs import tiny_run

RLHF = str(Path(sys.executable).parent / "rlhf")


def measure(command: list[str], runs: int) -> tuple[float, float]:
    """Median seconds of wall-clock and of user time, without the first run, which fills the disk cache."""
    wall, user = [], []
    for _ in range(runs + 1):
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall.append(time.perf_counter() - started)
        user.append(used.ru_utime)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return statistics.median(wall[1:]), statistics.median(user[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.yaml"
        run.write_text(yaml.safe_dump(tiny_run()), encoding="utf-8")
        commands: dict[str, tuple[list[str], float | None]] = {
            "python -c pass": ([sys.executable, "-c", "pass"], None),
            "rlhf --help": ([RLHF, "--help"], 0.35),
            "rlhf plugins list": ([RLHF, "plugins", "list"], 0.5),
            "rlhf config check": ([RLHF, "config", "check", str(run)], 0.5),
        }
        print("| command | wall, s | user, s | over python | bound, s |\n|---|---|---|---|---|")
        missed = []
        base = 0.0
        for name, (command, bound) in commands.items():
            wall, user = measure(command, options.runs)
            base = base or wall
            missed += [name] if bound is not None and wall > bound else []
            print(f"| `{name}` | {wall:.3f} | {user:.3f} | {wall / base:.1f}x | {bound or ''} |", flush=True)
    if missed:
        raise SystemExit(f"above the bound: {', '.join(missed)}")


if __name__ == "__main__":
    main()
