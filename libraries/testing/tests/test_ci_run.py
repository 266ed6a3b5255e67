"""`.ci/run` as a whole stays under 70 minutes: the slice of slow tests gets what lint and test leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import slices

MAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in test) echo "3 passed in 1.0s" ;; soak-slice) exit "$SLICE_STATUS" ;; esac
"""
TIMEOUT = """#!/bin/sh
echo "timeout $1 $2" >> "$CALLS"
shift 2
exec "$@"
"""


@pytest.mark.parametrize(
    ("taken", "slice_status", "status"), [(0, 0, 0), (2400, 0, 0), (2400, 124, 1), (4190, 0, 0)]
)
def test_ci_gives_the_slice_what_lint_and_test_leave(
    tmp_path: Path, taken: int, slice_status: int, status: int
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(slices.ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for name, text in (("make", MAKE), ("timeout", TIMEOUT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLICE_STATUS": str(slice_status),
        "SECONDS": str(taken),  # bash counts from here
    }
    before = int(time.time())
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status
    said = done.stdout.splitlines()
    assert said[-1] == "3 passed in 1.0s"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:2] == ["lint", "test"]
    if taken > 4000:
        assert calls[2:] == []
        assert "make soak-slice not run: out of time, lint and test took 69 of 70 minutes" in said
        return
    limit, soak = calls[2:]
    _, kill_after, seconds = limit.split()
    killed = int(seconds) + int(kill_after.removeprefix("--kill-after="))
    assert 0 < 70 * 60 - taken - killed <= 120, "the whole stays under 70 minutes, and uses them"
    target, _, until = soak.partition(" UNTIL=")
    assert target == "soak-slice"
    assert taken + int(until) - before < 70 * 60 - 60
    assert ("make soak-slice failed (exit 124)" in said) == (slice_status == 124)
