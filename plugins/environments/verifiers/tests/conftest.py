"""Makes the environments beside it importable by name, here and in processes that are started."""

import os
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def environments_are_installed():
    """As if their packages were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, FOLDER])
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), FOLDER))))
        yield
