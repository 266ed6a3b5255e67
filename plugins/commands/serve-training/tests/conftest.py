"""Makes the modules beside it importable by name, and a tiny model in a folder."""

import asyncio
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
def _closed():
    """Close the connections that the SDK leaves to the garbage collector, on its own thread."""
    yield
    holders = sys.modules.get("tinker.lib.internal_client_holder")
    loop = None if holders is None else holders._internal_client_holder_thread_singleton.loop_if_started()
    if loop is None:
        return
    gc.collect()

    async def close():
        for each in gc.get_objects():
            if issubclass(type(each), asyncio.Transport) and each._loop is loop:
                each.abort()
        await asyncio.sleep(0.1)  # until they are closed

    asyncio.run_coroutine_threadsafe(close(), loop).result(30)
