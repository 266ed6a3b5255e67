"""The process vLLM runs in: `python -m rlhf_vllm.serve SOCKET PARENT`.

`VllmProcess` starts it. It answers each request with a result and None, or with None and an error, after which it ends.
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
from .start import WHERE, described

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(descriptor: int) -> None:
    """Serve the connection. Ends when it closes or when the parent process is gone, whatever vLLM is doing."""
    end_with_parent()
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)  # vLLM has its own ranks, whatever started the parent
    warnings.simplefilter("ignore")
    connection = Connection(descriptor)
    try:
        backend = VllmBackend(connection.recv())
        answer: Any = backend.max_model_tokens
        while True:
            connection.send((answer, None))
            answer = _answer(backend, connection, *connection.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run is over
    except Exception as error:  # told to the parent, which raises it
        portable = RlhfError(f"vLLM failed: {described(error)}", where=WHERE, hint="its output is above")
        connection.send((None, error if isinstance(error, RlhfError) else portable))
    finally:
        connection.close()
        # vLLM's threads and process group are no longer needed, and may not end by themselves.
        sys.stderr.flush()
        os._exit(0)


def _answer(backend: VllmBackend, connection: Connection, method: str, *arguments: Any) -> Any:
    if method == "update":
        arguments = (_shards(connection),)
    return getattr(backend, method)(*arguments)


def _shards(connection: Connection) -> Iterator[Path]:
    """Ask for one shard after the other, as vLLM loads them."""
    connection.send((None, None))
    while (path := connection.recv()) is not None:
        yield path
        connection.send((None, None))  # one worker no longer reads it


if __name__ == "__main__":
    main(int(sys.argv[1]))
