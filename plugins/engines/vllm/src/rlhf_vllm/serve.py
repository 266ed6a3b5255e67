"""The process that runs vLLM: `python -m rlhf_vllm.serve SOCKET PARENT`.

`VllmProcess` starts it. It responds to each request with (result, None), or with (None, error), and then exits.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf_containment.processes import end_with_parent
from rlhf_core.errors import RlhfError

from .backend import VllmBackend
from .start import WHERE, describe_error

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(descriptor: int) -> None:
    """Serve the connection. Exits when it closes or the parent process exits, even while vLLM is busy."""
    end_with_parent()
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)  # vLLM has its own ranks, unrelated to the parent's launcher
    warnings.simplefilter("ignore")
    connection = Connection(descriptor)
    try:
        backend = VllmBackend(connection.recv())
        result: Any = backend.max_model_tokens
        while True:
            connection.send((result, None))
            result = _call_backend(backend, connection, *connection.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run is over
    except Exception as error:  # sent to the parent, which raises it
        portable = RlhfError(f"vLLM failed: {describe_error(error)}", where=WHERE, hint="see its output above")
        connection.send((None, error if isinstance(error, RlhfError) else portable))
    finally:
        connection.close()
        # vLLM's threads and process group are not needed any more, and may not end on their own.
        sys.stderr.flush()
        os._exit(0)


def _call_backend(backend: VllmBackend, connection: Connection, method: str, *arguments: Any) -> Any:
    if method == "update":
        arguments = (_receive_shards(connection),)
    return getattr(backend, method)(*arguments)


def _receive_shards(connection: Connection) -> Iterator[Path]:
    """Request shards one after the other, as vLLM loads them."""
    connection.send((None, None))
    while (path := connection.recv()) is not None:
        yield path
        connection.send((None, None))  # the shard has been loaded (by a single worker)


if __name__ == "__main__":
    main(int(sys.argv[1]))
