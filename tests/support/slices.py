"""Runs the slow tests: all of them (`make soak`), or the next slice (`make soak-slice`, from `.ci/run`).

    python tests/support/slices.py all [PYTEST ARGUMENT …]
    python tests/support/slices.py next [UNTIL]

`all` writes the duration of every file to `tests/durations.json`. `next` deals the files into slices of at most
`SLICE_SECONDS`, runs slice number (commits modulo number of slices), and runs each failing test once more, alone: a
test that fails twice fails the slice. A file longer than `LONGEST_FILE_SECONDS` is dealt test by test.

The slice ends after `LIMIT_SECONDS`, or at UNTIL (seconds since 1970, as `date +%s` prints them) if that is sooner.
Tests that were not run by then are named and do not fail the slice. A test that was still running is ended and
named, and fails the slice only if it ran for longer than `HANGING_SECONDS`, since a busy machine is slow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

ROOT = Path(__file__).parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
SLICE_SECONDS = 30 * 60.0
"""Planned duration of a slice."""
LIMIT_SECONDS = 35 * 60.0
"""Maximum duration of a slice: one deadline for targets, tests and retries, at which processes are killed."""
LAST_START_SECONDS = 5 * 60.0
"""Minimum remaining time for starting a test. Failed tests reserve the time to run them again."""
HANGING_SECONDS = 10 * 60.0
"""A test that ran for longer than this when it was cut counts as failed."""
OUT_OF_TIME = 124
"""Exit status of a command that was killed at the deadline, as `timeout` has it."""
LONGEST_FILE_SECONDS = 10 * 60.0
UNKNOWN_FILE_SECONDS = 120.0
TARGETS = ("soak-clients",)
"""Targets of the Makefile with tests that need a separate environment. Dealt like files."""
TARGET_SECONDS = 300.0
_SLOW = "slow and not gpu"
_END_SECONDS = 30.0
"""Time in which a killed process has to end."""

Durations = Mapping[str, "float | Mapping[str, float]"]
"""File -> seconds, or, if it is dealt test by test, the part of each test's id after the file -> seconds."""


@dataclass(slots=True)
class Slice:
    """Tests that are run together."""

    seconds: float = 0.0
    tests: list[str] = field(default_factory=list)
    """Files and ids of tests, as pytest takes them."""


def units(collected: Iterable[str], durations: Durations) -> dict[str, float]:
    """Return the units to deal (file or id of a test -> expected seconds) from the ids of all collected tests.

    A new test of a file that is dealt test by test counts as much as the mean of the known ones.
    """
    seconds_of: dict[str, float] = {}
    for test in collected:
        file, _, name = test.partition("::")
        known = durations.get(file, UNKNOWN_FILE_SECONDS)
        if isinstance(known, Mapping):
            seconds_of[test] = known.get(name, sum(known.values()) / max(1, len(known)))
        else:
            seconds_of[file] = known
    return seconds_of | dict.fromkeys(TARGETS, TARGET_SECONDS)


def deal(expected: Mapping[str, float], slice_seconds: float = SLICE_SECONDS) -> list[Slice]:
    """Return the slices found by first-fit decreasing. A unit longer than a slice gets its own."""
    slices: list[Slice] = []
    for unit, seconds in sorted(expected.items(), key=lambda each: (-each[1], each[0])):
        fitting = next((each for each in slices if each.seconds + seconds <= slice_seconds), None)
        if fitting is None:
            slices.append(fitting := Slice())
        fitting.tests.append(unit)
        fitting.seconds += seconds
    return slices


def measured(
    lines: Iterable[Mapping[str, object]], before: Durations, collected: Iterable[str]
) -> dict[str, float | dict[str, float]]:
    """Return the durations after a run. Files that were not run, and tests of files dealt test by test, keep theirs.

    If a test of a file failed or was not run, the file's duration may grow but not shrink. A skipped test counts.
    """
    took: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["outcome"] in ("passed", "skipped"):
            file, _, name = str(line["test"]).partition("::")
            took.setdefault(file, {})[name] = float(str(line["seconds"]))
    names: dict[str, list[str]] = {}
    for test in collected:
        file, _, name = test.partition("::")
        names.setdefault(file, []).append(name)
    found = {file: known if isinstance(known, float | int) else dict(known) for file, known in before.items()}
    for file, each in took.items():
        known = before.get(file, UNKNOWN_FILE_SECONDS)
        if isinstance(known, Mapping):
            each = {name: known[name] for name in names[file] if name in known} | each
        total = round(sum(each.values()), 1)
        complete = all(name in each for name in names[file])
        if total > LONGEST_FILE_SECONDS or (isinstance(known, Mapping) and not complete):
            found[file] = dict(sorted(each.items()))
        else:
            found[file] = total if complete or isinstance(known, Mapping) else max(known, total)
    return dict(sorted(found.items()))


def collect() -> list[str]:
    """Return the ids of all slow tests that this environment can run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", _SLOW, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=600)
    ids = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("SKIPPED")]
    if done.returncode or not ids:
        raise SystemExit(f"the slow tests cannot be collected:\n{done.stdout[-3000:]}")
    return ids


def run(command: Sequence[str], *, seconds: float | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Run a command and return its exit status. After `seconds` all of its processes are killed (`OUT_OF_TIME`)."""
    if seconds is None:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    process = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0)
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group and descendants with their own group, and wait until they have ended."""
    below = psutil.Process(process.pid).children(recursive=True)  # before they lose their parent
    os.killpg(process.pid, signal.SIGKILL)
    for each in below:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    deadline = time.monotonic() + _END_SECONDS
    while left := [each for each in below if _runs(each)]:
        if time.monotonic() > deadline:
            raise SystemExit(f"these do not end: {left}")
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_tests(
    tests: Sequence[str], *, seconds: float | None = None, last_start: float | None = None
) -> tuple[int, list[dict[str, object]]]:
    """Run tests, and return pytest's exit status and the last record of every test that was started.

    Args:
        tests: Files and ids of tests, or other arguments of pytest.
        seconds: Time after which pytest is killed.
        last_start: Time after which pytest skips the remaining tests, without a record.
    """
    with TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        record.touch()
        environment = {
            **os.environ,
            "RLHF_TEST_RECORD": str(record),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        if last_start is not None:
            environment["RLHF_TEST_SECONDS"] = str(last_start)
        command = [sys.executable, "-m", "pytest", "-p", "slow_record", "-m", _SLOW, *tests]
        try:
            status = run(command, seconds=seconds, environment=environment)
        except KeyboardInterrupt:  # pytest received it, too. The measurements so far are kept
            status = 130
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        return status, list({line["test"]: line for line in lines}.values())


def make(target: str, seconds: float) -> int:
    """Run `make TARGET`, and return its exit status."""
    return run(["make", target], seconds=seconds)


def number_of_commits() -> int:
    return int(subprocess.check_output(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, text=True))


def run_all(arguments: Sequence[str]) -> int:
    """Run every slow test, and record the durations."""
    collected = collect()
    status, lines = run_tests(arguments)
    before = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    DURATIONS.write_text(json.dumps(measured(lines, before, collected), indent=1) + "\n")
    return status


def run_next(limit_seconds: float = LIMIT_SECONDS) -> int:
    """Run the next slice. Return 0 if every test that was run passed, possibly in the second try."""
    deadline = time.monotonic() + min(limit_seconds, LIMIT_SECONDS)
    durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    collected = collect()
    slices = deal(units(collected, durations))
    number = number_of_commits() % len(slices)
    chosen = slices[number]
    print(f"slow tests, slice {number + 1} of {len(slices)}, about {chosen.seconds / 60:.0f} min", flush=True)
    for target in TARGETS:
        if target in chosen.tests and (status := _run_target(target, deadline)):
            return status
    wanted = [each for each in chosen.tests if each not in TARGETS]
    tests = [test for test in collected if test in wanted or test.partition("::")[0] in wanted]
    left = deadline - time.monotonic()
    if left < LAST_START_SECONDS:
        _print_not_run(tests)
        return 0
    status, lines = run_tests(wanted, seconds=left, last_start=left - LAST_START_SECONDS) if wanted else (0, [])
    outcomes = {str(line["test"]): line["outcome"] for line in lines}
    _print_not_run((test for test in tests if test not in outcomes), status)
    running = {
        str(line["test"]): time.monotonic() - float(str(line["at"])) for line in lines if line["outcome"] == "started"
    }
    for test, seconds in running.items():
        when = "at the deadline" if status == OUT_OF_TIME else "when pytest ended"
        print(f"{test} was running {when}, for {seconds:.0f} s", flush=True)
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    if status not in (0, 1):  # pytest itself ended, so that tests were not run
        for test in failed:
            print(f"{test} failed", flush=True)
        slow = status == OUT_OF_TIME and running and max(running.values()) <= HANGING_SECONDS
        return 0 if slow and not failed else status
    return _run_again(failed, deadline) if failed else status


def _print_not_run(names: Iterable[str], status: int = 0) -> None:
    """Print the tests that were not run. `status` is pytest's."""
    for name in names:
        print(f"not run: {'out of time' if status in (0, 1, OUT_OF_TIME) else 'pytest ended'}: {name}", flush=True)


def _run_target(target: str, deadline: float) -> int:
    """Run a target of the Makefile, again if it fails, and return its exit status."""
    status = 0
    for _ in range(2):
        left = deadline - time.monotonic()
        if left < LAST_START_SECONDS:
            if status:
                print(f"make {target} failed, and there is no time to run it again", flush=True)
            else:
                _print_not_run([f"make {target}"])
            return status
        status = make(target, left)
        if status in (0, OUT_OF_TIME):
            break
    if status:
        print(f"make {target} {'was running at the deadline' if status == OUT_OF_TIME else 'failed twice'}", flush=True)
    return status


def _run_again(failed: Iterable[str], deadline: float) -> int:
    """Run each of these tests alone. Return 0 if all pass before the deadline."""
    for test in failed:
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"{test} failed, and there is no time to run it again", flush=True)
            return 1
        status, _ = run_tests([test], seconds=left)
        if status == OUT_OF_TIME:
            print(f"{test} failed, and there was too little time to run it again", flush=True)
            return 1
        if status:
            print(f"{test} failed twice", flush=True)
            return 1
        print(f"{test} failed, and passed when run again alone", flush=True)
    return 0


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # `run` kills its processes
    match sys.argv[1:]:
        case ["all", *arguments]:
            raise SystemExit(run_all(arguments))
        case ["next"]:
            raise SystemExit(run_next())
        case ["next", until]:
            raise SystemExit(run_next(float(until) - time.time()))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
