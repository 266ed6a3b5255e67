"""Starts Ray's workers in a fraction of a second: forks them from a process that has already imported their modules.

That process is itself forked from the one of `running.Forked`, so that these modules are imported once. Like a worker
started by Ray, each has its own process and connection. The raylet starts a small stub, which passes on the command
line and runs as long as its worker. Ending the stub ends the worker, so that the process tree and the environment look
the same to tests. A stub that does not get a worker becomes one, as Ray would have started it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from running import PARTS_OF_RUNS, Forked, ended, fsync_of_pipes

ADDRESS = "RLHF_TEST_RAY_WORKERS"
"""Environment variable with the socket at which stubs request a worker."""
_STUB = str(Path(__file__).with_name("ray_worker_stub.py"))
_PRELOAD = ("transformers.generation.utils", "rlhf_seed", *PARTS_OF_RUNS)
"""Without Ray itself, whose C++ part reads the environment when it is imported."""
TAKEN = b"+"
"""Byte sent to a stub once its worker is forked. Without it, the stub becomes the worker."""
_ORDER_SECONDS = 10.0


@contextmanager
def worker_source() -> Iterator[None]:
    """Context with the process that forks workers for `quick_workers`, here and in processes started inside."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = os.path.join(folder, "workers")
        listener.bind(address)
        listener.listen(64)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            source = Forked(serve, listener, theirs)
            theirs.close()
            listener.close()  # if the source dies, a stub is refused and starts a worker like Ray
            os.environ[ADDRESS] = address
            with ended(source):
                try:
                    yield
                finally:
                    del os.environ[ADDRESS]
                    ours.close()
                    output = source.finish()
                assert source.returncode == 0, output


@contextmanager
def quick_workers() -> Iterator[None]:
    """Context in which a started Ray gets its workers from the process of `worker_source`.

    It does not scale a cluster or print what workers print, which two more processes would do.
    """
    from ray._private import node, ray_constants

    assert ADDRESS in os.environ, "no source of workers, which the fixture `ray_worker_source` starts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", _STUB)
        for unused in ("start_log_monitor", "start_monitor"):
            patch.setattr(node.Node, unused, lambda self: None)
        yield


def serve(listener: socket.socket, owner: socket.socket) -> None:
    """Fork a worker for every request of a stub until the owner closes its end. Then kill the running workers."""
    for name in _PRELOAD:
        with suppress(ImportError):  # a plugin that is not installed here
            importlib.import_module(name)
    # Without the folders of test modules, which a worker started by Ray does not find either.
    root = Path(__file__).parents[2]
    of_tests = {
        each for each in sys.path if "tests" in Path(each).parts[len(root.parts) :] and root in Path(each).parents
    }
    sys.path[:] = ["", str(Path(__file__).parent), *(each for each in sys.path if each not in of_tests)]
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process -> (process id, connection)
    with selectors.DefaultSelector() as selector:
        selector.register(owner, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is owner:
                    for pid, _ in running.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fd not in selector.get_map():
                    continue  # closed by another event of this round
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    if (received := _received(connection)) is None:
                        connection.close()
                        continue
                    order, streams = received
                    if (pid := os.fork()) == 0:
                        selector.close()
                        for other in (owner, listener, connection, *(each for _, each in running.values())):
                            other.close()
                        _work(order, streams)
                    for number in streams:
                        os.close(number)
                    descriptor = os.pidfd_open(pid)
                    running[descriptor] = (pid, connection)
                    selector.register(descriptor, selectors.EVENT_READ)
                    selector.register(connection, selectors.EVENT_READ, pid)
                    _send(connection, TAKEN)
                elif key.data is not None:  # the stub ended
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)
                else:  # the worker ended
                    pid, connection = running.pop(key.fd)
                    _, status = os.waitpid(pid, 0)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    if connection in selector.get_map():
                        selector.unregister(connection)
                    with connection:
                        _send(connection, struct.pack("!i", os.waitstatus_to_exitcode(status)))


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a stub's request, or None if the stub ended before it was complete."""
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


def _send(connection: socket.socket, message: bytes) -> None:
    with suppress(OSError):  # the other end is closed
        connection.sendall(message)


def _work(order: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the worker like Ray's `setup_worker.py`, without a new interpreter, and end as an interpreter does."""
    code = 1
    try:
        _run_worker(order, streams)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_worker(order: dict[str, Any], streams: list[int]) -> None:
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
    (serialized,) = [each[len(context) :] for each in order["arguments"] if each.startswith(context)] or ["{}"]
    update_envs(RuntimeEnvContext.deserialize(serialized).env_vars)
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    sys.path[1:1] = added
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
