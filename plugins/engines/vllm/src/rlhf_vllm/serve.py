"""The process vLLM runs in: `python -m rlhf_vllm.serve SOCKET PARENT`.

`VllmProcess` starts it. It answers on the socket until the other side closes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from rlhf_core.distributed import end_with_parent
from rlhf_core.errors import RlhfError
from rlhf_core.types import SamplingParams

from .backend import VllmBackend
from .jobs import Job, Joining
from .start import WHERE, described

if TYPE_CHECKING:
    from torch import Tensor


_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(descriptor: int) -> None:
    """Serve the connection. Ends when it closes or when the parent process is gone, whatever vLLM is doing."""
    end_with_parent()
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)  # vLLM has its own ranks, whatever started the parent
    connection = Connection(descriptor)
    try:
        try:
            backend = VllmBackend(connection.recv())
            connection.send(("ready", (backend.max_model_tokens, backend.forgets_weights)))
            while True:
                _answer(backend, connection, connection.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the run is over
        except Exception as error:  # told to the parent, which raises it
            connection.send(("failed", _portable(error)))
    finally:
        connection.close()
        # vLLM's threads and process group are no longer needed, and may not end by themselves.
        sys.stderr.flush()
        os._exit(0)


def _answer(backend: VllmBackend, connection: Connection, message: tuple[Any, ...]) -> None:
    kind, *arguments = message
    if kind == "generate":
        with closing(backend.generate(*arguments)) as completions:
            for completion in completions:
                connection.send(("completion", completion))
                if connection.poll():  # only an abort is sent before `done`
                    connection.recv()
                    break
    elif kind == "fly":
        for completion in backend.generate_in_flight(Joins(backend, connection)):
            connection.send(("completion", completion))
    elif kind == "update":
        backend.update(_shards(connection))
    # An abort that crossed the last completion comes after `done`: there is nothing left to stop.
    if kind != "abort":
        connection.send(("done", None))


class Joins:
    """Reads what `VllmProcess.generate_in_flight` sends between two steps."""

    def __init__(self, backend: VllmBackend, connection: Connection) -> None:
        self._backend = backend
        self._connection = connection
        self._num_loads = 0
        self._over = False

    def __call__(self, busy: bool) -> tuple[Joining, int]:
        joining: list[tuple[Job, SamplingParams]] = []
        while not self._over and (self._connection.poll() or not (busy or joining)):
            kind, *arguments = self._connection.recv()
            if kind == "add":
                joining += arguments[0]
                self._num_loads = arguments[1]
            elif kind == "hold":
                self._connection.send(("held", None))
                _answer(self._backend, self._connection, self._connection.recv())
                self._num_loads += 1
            else:
                assert kind == "land", kind
                self._over = True
        return joining, self._num_loads


def _shards(connection: Connection) -> Iterator[dict[str, Tensor]]:
    while (path := connection.recv()) is not None:
        shard = load_file(path)
        path.unlink()  # the pages live as long as the tensors; no file is left if either side is killed
        yield shard
        connection.send(("loaded", None))  # vLLM no longer reads it


def _portable(error: Exception) -> RlhfError:
    if isinstance(error, RlhfError):
        return error
    return RlhfError(f"vLLM failed: {described(error)}", where=WHERE, hint="its output is above")


if __name__ == "__main__":
    main(int(sys.argv[1]))
