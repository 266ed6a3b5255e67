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
    """Whatever became of its episodes, a player leaves nothing that listens; what others left may go on."""
    before = listeners()
    yield
    assert listeners() <= before


def listeners():
    """The addresses that this process listens at."""
    found = psutil.Process().net_connections("inet")
    return {each.laddr for each in found if each.status == psutil.CONN_LISTEN}
