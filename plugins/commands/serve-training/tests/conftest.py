"""Makes the modules beside it importable by name, and a tiny model in a folder."""

import asyncio
import gc
import sys
import time
from pathlib import Path

import pytest

from rlhf_testing.models import save_tiny_model

_CLOSE_SECONDS = 10.0
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("base") / "tiny"))


@pytest.fixture(scope="module", autouse=True)
def _collected():
    """Close or collect the connections that the SDK leaves while the module's filter of warnings applies."""
    yield
    holders = sys.modules.get("tinker.lib.internal_client_holder")
    if holders is None:
        return
    sessionless_holder_cache = holders.sessionless_holder_cache
    for holder in sessionless_holder_cache._holders.values():
        asyncio.run_coroutine_threadsafe(holder.aclose(), holder.get_loop()).result(30)
    sessionless_holder_cache._holders.clear()
    deadline = time.monotonic() + _CLOSE_SECONDS
    while time.monotonic() < deadline:
        gc.collect()
        if not any(issubclass(type(each), asyncio.Transport) for each in gc.get_objects()):
            return
        time.sleep(0.1)  # a holder's connections are closed on its own thread
