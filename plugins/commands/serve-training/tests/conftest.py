"""Makes the modules beside it importable by name, and a tiny model in a folder."""

import gc
import sys
from pathlib import Path

import pytest

from rlhf_testing.models import save_tiny_model

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("base") / "tiny"))


@pytest.fixture(scope="module", autouse=True)
def _collected():
    """Collect the connections that the SDK leaves while the module's filter of warnings applies."""
    yield
    gc.collect()
