"""A server in its own process, as a user starts it, or in this process, which is faster, and clients of it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rlhf_serve_training.app import server_limits
from rlhf_serve_training.options import WorkerOptions
from rlhf_serve_training.running import ServeOptions, assemble
from rlhf_serve_training.worker import Worker
from rlhf_web import WebServer

KEYS = {"alice": "tml-" + "a" * 32, "bob": "tml-" + "b" * 32}
_START_SECONDS = 120.0
LEFT_BY_THE_SDK = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*(socket|_SelectorTransport):pytest.PytestUnraisableExceptionWarning"
)
"""The SDK leaves its connections in this process to the garbage collector. The server's log is checked for its own."""


class RunningServer:
    """One process, or a launcher with its ranks."""

    def __init__(self, base, output, *options):
        self.output = output
        self.log = open(f"{output}.log", "a+")  # noqa: SIM115 (closed by `running`)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONWARNINGS"] = "default::ResourceWarning"  # `running` looks for them
        environment |= {f"KEY_{name.upper()}": key for name, key in KEYS.items()}
        tenants = [each for name in KEYS for each in ("--tenant", f"{name}=KEY_{name.upper()}")]
        command = ["serve-training", "--base", base, "--output", str(output), "--port", "0", "--max-rank", "8"]
        begin = self.log.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_cli", *command, *tenants, *options],
            env=environment,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        try:
            self.address = self._address(begin)
        except BaseException:
            self.stop()
            raise

    def _address(self, begin):
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.log.seek(begin)
            text = self.log.read()
            if found := re.search(r"for training at (http://\S+)", text):
                return found[1]
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended: {text}")
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {text}")

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self.log.close()


@contextmanager
def running(base, output, *options):
    server = RunningServer(base, output, *options)
    try:
        yield server
    finally:
        server.stop()
    with open(f"{output}.log") as log:
        assert "ResourceWarning" not in log.read()


@contextmanager
def running_here(base, output):
    """A server on a thread of this process."""
    output.mkdir()
    tenants = {name: f"KEY_{name.upper()}" for name in KEYS}
    worker = Worker(WorkerOptions(base, max_rank=8, device="cpu"))
    with pytest.MonkeyPatch.context() as patch:
        for name, key in KEYS.items():
            patch.setenv(tenants[name], key)
        parts = assemble(worker, ServeOptions(worker={}, output=str(output), tenants=tenants))
    loop, server = asyncio.new_event_loop(), WebServer(parts.app, server_limits(parts.service))

    async def start():
        await server.listen("127.0.0.1", 0, where="test")
        parts.service.start()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        yield SimpleNamespace(address=server.address, output=output)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0.5), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
        assert parts.service.stop(30)
        assert parts.service.failed is None
        parts.store.close()
        parts.ranks.stop()


def rest(server, tenant="alice"):
    """A `tinker.RestClient` for a tenant."""
    import tinker

    return tinker.RestClient(base_url=server.address, api_key=KEYS[tenant])


def new_client(server, tenant="alice"):
    """A `tinker.ServiceClient` for a tenant, which its owner closes."""
    import tinker

    return tinker.ServiceClient(base_url=server.address, api_key=KEYS[tenant])


@contextmanager
def client(server, tenant="alice"):
    """A `tinker.ServiceClient` for a tenant."""
    service = new_client(server, tenant)
    try:
        yield service
    finally:
        service.close("success").result(30)


def datum(tokens, **inputs):
    """A datum that predicts each token from those before it."""
    from tinker import types

    values = {"target_tokens": list(tokens[1:])} | {key: list(value) for key, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=values)
