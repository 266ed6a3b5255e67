"""`.ci/run` as a whole stays under 70 minutes: the slice of slow tests gets what lint and test leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import slices

MAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in test) echo "3 passed in 1.0s"; exit "$TEST_STATUS" ;; soak-slice) exit "$SLICE_STATUS" ;; esac
"""
HANGING_MAKE = """#!/bin/sh
[ "$1" = {} ] || exit 0
sleep 600 &
echo $! > "$CALLS.part"
mv "$CALLS.part" "$CALLS"
wait
"""
TIMEOUT = """#!/bin/sh
echo "timeout $1 $2" >> "$CALLS"
shift 2
exec "$@"
"""


@pytest.fixture
def ci(tmp_path: Path) -> dict[str, str]:
    """Make a copy of `.ci/run`; the environment for it, whose `make` and `timeout` write their arguments to `calls`."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(slices.ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for name, text in (("make", MAKE), ("timeout", TIMEOUT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "TEST_STATUS": "0",
        "SLICE_STATUS": "0",
    }


def run(ci: dict[str, str], folder: Path, **environment: int) -> tuple[int, list[str], list[list[str]]]:
    """Exit status, lines printed, and the calls of `make`, each with the seconds after which it is killed."""
    command = [folder / ".ci" / "run"]
    added = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(command, env=ci | added, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    calls, limit = [], ""
    for line in (folder / "calls").read_text().splitlines():
        if line.startswith("timeout "):
            _, kill_after, seconds = line.split()
            limit = str(int(seconds) + int(kill_after.removeprefix("--kill-after=")))
        else:
            calls.append([limit, *line.split()])
    return done.returncode, done.stdout.splitlines(), calls


@pytest.mark.parametrize(("taken", "slice_status"), [(0, 0), (2400, 0), (2400, 124)])
def test_the_slice_gets_what_lint_and_test_leave(
    ci: dict[str, str], tmp_path: Path, taken: int, slice_status: int
) -> None:
    before = time.time()
    status, printed, calls = run(ci, tmp_path, SECONDS=taken, SLICE_STATUS=slice_status)  # bash counts from SECONDS
    assert status == (1 if slice_status else 0)
    assert printed[-1] == "3 passed in 1.0s"
    assert ("make soak-slice failed (exit 124)" in printed) == (slice_status == 124)
    assert [target for _, target, *_ in calls] == ["lint", "test", "soak-slice"]
    for limit, *_ in calls:
        assert 0 < 70 * 60 - taken - int(limit) <= 60, "everything ends before 70 minutes, and may use them"
    until = int(calls[2][2].removeprefix("UNTIL="))
    assert 70 * 60 - 180 < taken + until - before < 70 * 60 - 60


def test_no_slice_starts_late(ci: dict[str, str], tmp_path: Path) -> None:
    status, printed, calls = run(ci, tmp_path, SECONDS=3800)
    assert status == 0
    assert [target for _, target, *_ in calls] == ["lint", "test"]
    assert "not run: out of time: make soak-slice (lint and test took 63 of 70 minutes)" in printed
    assert printed[-1] == "3 passed in 1.0s"


def test_no_slice_starts_after_a_failure(ci: dict[str, str], tmp_path: Path) -> None:
    status, printed, calls = run(ci, tmp_path, TEST_STATUS=2)
    assert status == 1
    assert [target for _, target, *_ in calls] == ["lint", "test"]
    assert printed[-2:] == ["make test failed (exit 2)", "3 passed in 1.0s"]


def ends_within(seconds: float, pid: int) -> bool:
    """Whether the process ends: it was sent its signal before `.ci/run` ended, but may not have acted on it yet."""
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("target", ["lint", "test", "soak-slice"])
@pytest.mark.parametrize("how", ["SIGTERM", "time is up"])
@pytest.mark.slow
def test_what_was_started_ends(ci: dict[str, str], tmp_path: Path, target: str, how: str) -> None:
    (tmp_path / "timeout").unlink()  # the real one
    (tmp_path / "make").write_text(HANGING_MAKE.format(target))
    if how == "time is up":
        run_script = tmp_path / ".ci" / "run"
        run_script.write_text(
            run_script.read_text().replace("end=$((69 * 60))", "end=3").replace("-ge 600", "-ge -600")
        )
    process = subprocess.Popen([tmp_path / ".ci" / "run"], env=ci, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "calls").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if how == "SIGTERM":
            process.terminate()
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert ends_within(10.0, int((tmp_path / "calls").read_text()))
    if how == "SIGTERM":
        assert process.returncode == 143
    else:
        assert process.returncode == 1
        assert f"make {target} failed (exit 124)" in printed
