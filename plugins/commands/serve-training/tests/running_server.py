"""A server in its own process, as a user starts it, and clients of it."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

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
