"""Pytest plugin (`-p slow_record`) that records outcome and duration of every test, and skips tests after a deadline.

`RLHF_TEST_RECORD` is the file that receives a JSON line when a test starts and one when it ends, of which the last one
counts. Its `at` is the time of `time.monotonic`. `RLHF_TEST_SECONDS` is the time, in seconds, after which the remaining
tests are skipped without a record. A failed test brings that time forward by its duration, which the second try needs.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

_SECONDS = float(os.environ.get("RLHF_TEST_SECONDS", "inf"))
_STARTED = time.monotonic()
_late: set[str] = set()
_seconds: dict[str, float] = defaultdict(float)
_outcomes: dict[str, str] = {}


def _write(test: str, outcome: str) -> None:
    with Path(os.environ["RLHF_TEST_RECORD"]).open("a") as file:
        line = {"test": test, "outcome": outcome, "seconds": round(_seconds[test], 1), "at": time.monotonic()}
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the test if its session is out of time."""
    reserved = sum(_seconds[test] for test, outcome in _outcomes.items() if outcome == "failed")
    if time.monotonic() - _STARTED > _SECONDS - reserved:
        _late.add(item.nodeid)
        pytest.skip(f"not run: {_SECONDS:.0f} s are over, {reserved:.0f} s of them for retries (RLHF_TEST_SECONDS)")
    _write(item.nodeid, "started")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add up the phases of a test, and write its line after the last one."""
    report = yield
    _seconds[item.nodeid] += report.duration
    if report.failed or report.when == "call" or (report.when == "setup" and report.skipped):
        _outcomes[item.nodeid] = "failed" if report.failed else _outcomes.get(item.nodeid, report.outcome)
    if report.when == "teardown" and (item.nodeid not in _late or _outcomes[item.nodeid] == "failed"):
        _write(item.nodeid, _outcomes[item.nodeid])
    return report
