"""Makes the modules beside it importable by name, here and in processes that are started: as if installed."""

import os
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parent)
sys.path.append(FOLDER)


@pytest.fixture(scope="session", autouse=True)
def environments_are_installed():
    """Their packages, for processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), FOLDER))))
        yield
