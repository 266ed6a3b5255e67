"""Makes the modules beside it importable by name, and a model that calls a tool."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from adding_agent import ADD, QUESTION
from tool_models import save_tool_model


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory):
    """A model folder."""
    return save_tool_model(tmp_path_factory.mktemp("model"), tools=[ADD], messages=QUESTION)
