"""Makes the modules beside it importable by name, and a model that calls a tool."""

import sys
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parent))

from adding_agent import ADD, QUESTION
from tool_models import save_tool_model


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory):
    """A model folder."""
    return save_tool_model(tmp_path_factory.mktemp("model"), tools=[ADD], messages=QUESTION)


@pytest.fixture
def nothing_is_left():
    """Whatever became of its episodes, a player leaves nothing that listens."""
    yield
    assert not [each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
