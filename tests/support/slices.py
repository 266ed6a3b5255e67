"""Runs the slow tests: all of them (`make soak`), or the slice whose turn it is (`make soak-slice`, from `.ci/run`).

    python tests/support/slices.py all [PYTEST ARGUMENT …]
    python tests/support/slices.py next

`all` writes how long every file took to `tests/durations.json`. `next` deals the files into slices of at most
`SLICE_SECONDS`, runs slice number (commits modulo number of slices), and runs each failing test once more, alone: a
test that fails twice fails the slice. A file longer than `LONGEST_FILE_SECONDS` is dealt test by test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
SLICE_SECONDS = 30 * 60.0
"""Planned duration of a slice. No test of a slice starts after `LAST_START_SECONDS`, whatever was planned."""
LAST_START_SECONDS = 35 * 60.0
RETRY_SECONDS = 15 * 60.0
"""Time after which no failed test is run again: it counts as failed."""
LONGEST_FILE_SECONDS = 10 * 60.0
UNKNOWN_FILE_SECONDS = 120.0
TARGETS = ("soak-verifiers", "soak-loggers")
"""Targets of the Makefile with tests that need an environment of their own; dealt like files."""
TARGET_SECONDS = 300.0
_SLOW = "slow and not gpu"

Durations = Mapping[str, "float | Mapping[str, float]"]
"""File -> seconds, or, if it is dealt test by test, the part of each test's id after the file -> seconds."""


@dataclass(slots=True)
class Slice:
    """Tests that are run together."""

    seconds: float = 0.0
    tests: list[str] = field(default_factory=list)
    """Files and ids of tests, as pytest takes them."""


def units(collected: Iterable[str], durations: Durations) -> dict[str, float]:
    """What is dealt, file or id of a test -> expected seconds, from the ids of all collected tests.

    A new test of a file that is dealt test by test counts as much as the mean of the known ones.
    """
    found: dict[str, float] = {}
    for test in collected:
        file, _, name = test.partition("::")
        known = durations.get(file, UNKNOWN_FILE_SECONDS)
        if isinstance(known, Mapping):
            found[test] = known.get(name, sum(known.values()) / max(1, len(known)))
        else:
            found[file] = known
    return found | dict.fromkeys(TARGETS, TARGET_SECONDS)


def deal(expected: Mapping[str, float], slice_seconds: float = SLICE_SECONDS) -> list[Slice]:
    """The fewest slices that first-fit decreasing finds; what is longer than a slice gets one of its own."""
    slices: list[Slice] = []
    for unit, seconds in sorted(expected.items(), key=lambda each: (-each[1], each[0])):
        fitting = next((each for each in slices if each.seconds + seconds <= slice_seconds), None)
        if fitting is None:
            slices.append(fitting := Slice())
        fitting.tests.append(unit)
        fitting.seconds += seconds
    return slices


def measured(lines: Iterable[Mapping[str, object]], before: Durations) -> dict[str, float | dict[str, float]]:
    """Durations after a run: files, and tests of files that are dealt test by test, keep theirs if not run."""
    tests: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["outcome"] == "passed":
            file, _, name = str(line["test"]).partition("::")
            tests.setdefault(file, {})[name] = float(str(line["seconds"]))
    found: dict[str, float | dict[str, float]] = {
        file: known if isinstance(known, float | int) else dict(known) for file, known in before.items()
    }
    for file, each in tests.items():
        known = before.get(file)
        whole = {**known, **each} if isinstance(known, Mapping) else each
        total = round(sum(whole.values()), 1)
        found[file] = dict(sorted(whole.items())) if total > LONGEST_FILE_SECONDS else total
    return dict(sorted(found.items()))


def collect() -> list[str]:
    """Ids of all slow tests that this environment can run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", _SLOW, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=600)
    ids = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("SKIPPED")]
    if done.returncode or not ids:
        raise SystemExit(f"the slow tests cannot be collected:\n{done.stdout[-3000:]}")
    return ids


def run_tests(tests: Sequence[str], *, seconds: float | None = None) -> tuple[int, list[dict[str, object]]]:
    """Pytest's exit status and a record of every test that was run."""
    with TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        record.touch()
        environment = {
            **os.environ,
            "RLHF_TEST_RECORD": str(record),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        if seconds is not None:
            environment["RLHF_TEST_SECONDS"] = str(seconds)
        command = [sys.executable, "-m", "pytest", "-p", "slow_record", "-m", _SLOW, *tests]
        try:
            status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        except KeyboardInterrupt:  # pytest had it, too; what was measured is kept
            status = 130
        return status, [json.loads(line) for line in record.read_text().splitlines()]


def make(target: str) -> int:
    """Exit status of `make TARGET`."""
    return subprocess.run(["make", target], cwd=ROOT, check=False).returncode


def run_all(arguments: Sequence[str]) -> int:
    """Run every slow test, and keep what they took."""
    status, lines = run_tests(arguments)
    before = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    DURATIONS.write_text(json.dumps(measured(lines, before), indent=1) + "\n")
    return status


def run_next() -> int:
    """Run the slice whose turn it is; 0 if every test passed, at the latest when run again."""
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    slices = deal(units(collect(), durations))
    commits = subprocess.check_output(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, text=True)
    number = int(commits) % len(slices)
    chosen = slices[number]
    print(f"slow tests, slice {number + 1} of {len(slices)}, about {chosen.seconds / 60:.0f} min", flush=True)
    for target in TARGETS:
        if target in chosen.tests and make(target) and make(target):
            print(f"make {target} failed twice", flush=True)
            return 1
    tests = [each for each in chosen.tests if each not in TARGETS]
    status, lines = run_tests(tests, seconds=LAST_START_SECONDS) if tests else (0, [])
    if status not in (0, 1):  # pytest itself ended, so that tests were not run
        return status
    failed = [str(line["test"]) for line in lines if line["outcome"] == "failed"]
    if not failed:
        return status
    again = 0.0
    for test in failed:
        if again > RETRY_SECONDS:
            print(f"{test} failed, and there is no time to run it again", flush=True)
            return 1
        status, lines = run_tests([test])
        again += sum(float(str(line["seconds"])) for line in lines)
        if status:
            print(f"{test} failed twice", flush=True)
            return 1
        print(f"{test} failed, and passed when run again alone", flush=True)
    return 0


def main() -> None:
    match sys.argv[1:]:
        case ["all", *arguments]:
            raise SystemExit(run_all(arguments))
        case ["next"]:
            raise SystemExit(run_next())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
