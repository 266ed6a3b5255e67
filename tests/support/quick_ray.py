"""Ray's workers in a fraction of a second: forked from one process that has imported already what they import.

A worker is as real as one that Ray starts by itself, with its own process, connection and death. Between it and the
raylet stands a small stub, which the raylet starts: it hands the command line on and lives as long as the worker.
Whoever ends the stub ends the worker, so that by process tree and environment all is found as without this. A stub
that gets no worker becomes one, as Ray would have started it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from running import fsync_of_pipes

ADDRESS = "RLHF_TEST_RAY_WORKERS"
"""Environment variable: the socket at which stubs ask for a worker."""
_STUB = str(Path(__file__).with_name("ray_worker_stub.py"))
_PRELOAD = (
    "peft",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "rlhf_seed",
    "rlhf_core.training.session",
    "rlhf_colossalai.ddp",
)
"""Not Ray itself: its C++ half reads the environment when it is imported."""
TAKEN = b"+"
"""Byte sent to a stub when its worker is forked; without it, it becomes the worker itself."""
_ORDER_SECONDS = 10.0


@contextmanager
def worker_source() -> Iterator[None]:
    """Inside, `quick_workers` has somebody to ask, in this process and in those it starts."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = os.path.join(folder, "workers")
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-c", f"import quick_ray; quick_ray.serve({listener.fileno()})"]
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        source = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        listener.close()  # should the source die, a stub is refused, and starts a worker as Ray does
        os.environ[ADDRESS] = address
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            assert source.stdin is not None
            source.stdin.close()
            source.wait()


@contextmanager
def quick_workers() -> Iterator[None]:
    """A Ray that is started inside gets its workers from there; as Ray does it where there is no source."""
    from ray._private import ray_constants

    assert ADDRESS in os.environ, "no source of workers: it is started by the fixture `ray_worker_source`"
    before = ray_constants.SETUP_WORKER_FILENAME
    ray_constants.SETUP_WORKER_FILENAME = _STUB
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = before


def serve(listener_number: int) -> None:
    """Fork a worker for every stub that asks, until standard input closes; then end those that run."""
    for name in _PRELOAD:
        with suppress(ImportError):  # a plugin that is not installed here
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(fileno=listener_number)
    running: dict[int, tuple[int, socket.socket]] = {}  # process, connection by the descriptor of the process
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    for pid, _ in running.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fd not in selector.get_map():
                    continue  # another event of this round was the end of both
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    if (received := _received(connection)) is None:
                        connection.close()
                        continue
                    order, streams = received
                    if (pid := os.fork()) == 0:
                        selector.close()
                        for other in (listener, connection, *(each for _, each in running.values())):
                            other.close()
                        _work(order, streams)
                    for number in streams:
                        os.close(number)
                    descriptor = os.pidfd_open(pid)
                    running[descriptor] = (pid, connection)
                    selector.register(descriptor, selectors.EVENT_READ)
                    selector.register(connection, selectors.EVENT_READ, pid)
                    _send(connection, TAKEN)
                elif key.data is not None:  # the stub is gone
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)
                else:  # the worker is
                    pid, connection = running.pop(key.fd)
                    _, status = os.waitpid(pid, 0)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    if connection in selector.get_map():
                        selector.unregister(connection)
                    with connection:
                        _send(connection, struct.pack("!i", os.waitstatus_to_exitcode(status)))


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A stub's request; None where it went before it was complete."""
    connection.settimeout(_ORDER_SECONDS)
    streams: list[int] = []
    try:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        (length,) = struct.unpack("!Q", head)
        text = b""
        while len(text) < length:
            if not (part := connection.recv(length - len(text))):
                raise EOFError
            text += part
        return json.loads(text), streams
    except (OSError, EOFError, struct.error):
        for number in streams:
            os.close(number)
        return None


def _send(connection: socket.socket, said: bytes) -> None:
    with suppress(OSError):  # where nobody listens any more
        connection.sendall(said)


def _work(order: dict[str, Any], streams: list[int]) -> None:
    """Be the worker: what Ray's `setup_worker.py` does, without a new interpreter."""
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.fsync = fsync_of_pipes
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    context = "--serialized-runtime-env-context="
    arguments = [each for each in order["arguments"] if not each.startswith((context, "--language="))]
    (given,) = [each[len(context) :] for each in order["arguments"] if each.startswith(context)] or ["{}"]
    update_envs(RuntimeEnvContext.deserialize(given).env_vars)
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    sys.path[1:1] = added
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit()
