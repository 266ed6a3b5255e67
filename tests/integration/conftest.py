"""The helpers of these tests are modules beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this process write no report: its plots take longer than a tiny run, and have tests of their own."""
    monkeypatch.setattr("rlhf_core.report.build_report", lambda folders: None)
