"""The helpers of these tests are modules beside them."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def own_logger() -> Iterator[None]:
    """What the command does to the logger `rlhf` is undone."""
    logger = logging.getLogger("rlhf")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers, logger.level = handlers, level
