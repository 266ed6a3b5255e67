"""A pytest plugin (`-p slow_record`) that records outcome and duration of every test, and starts none after a deadline.

`RLHF_TEST_RECORD` is the file that gets a JSON line per finished test; `RLHF_TEST_SECONDS` is the time, in seconds,
after which the remaining tests are skipped.
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
_seconds: dict[str, float] = defaultdict(float)
_outcomes: dict[str, str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the test if its session is out of time."""
    if time.monotonic() - _STARTED > _SECONDS:
        pytest.skip(f"not run: {_SECONDS:.0f} s are over (RLHF_TEST_SECONDS)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add up the phases of a test, and write its line after the last one."""
    report = yield
    _seconds[item.nodeid] += report.duration
    if report.failed or report.when == "call" or (report.when == "setup" and report.skipped):
        _outcomes[item.nodeid] = "failed" if report.failed else _outcomes.get(item.nodeid, report.outcome)
    if report.when == "teardown":
        line = {"test": item.nodeid, "outcome": _outcomes[item.nodeid], "seconds": round(_seconds[item.nodeid], 1)}
        with Path(os.environ["RLHF_TEST_RECORD"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report
