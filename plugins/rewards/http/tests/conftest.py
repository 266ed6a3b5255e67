"""Makes `http_rewards` importable by name, and ends what a failing test left running."""

import sys
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS

sys.path.append(str(Path(__file__).parent))

from http_rewards import ServedProcess


@pytest.fixture
def serve():
    """serve(*arguments): a `ServedProcess`."""
    started = []

    def start(*arguments, **options):
        started.append(ServedProcess(*arguments, **options))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate(timeout=PATIENCE_SECONDS)
