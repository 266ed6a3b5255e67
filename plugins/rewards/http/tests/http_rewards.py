"""Samples, rewards for a served process to run, and servers for the tests."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

from rlhf_core.types import Rollout
from rlhf_reward_http.server import make_app
from rlhf_web import ServerLimits, WebServer

PATIENCE_SECONDS = 600.0
"""As in `running`, which a served process, that imports this module, does not find."""


def make_rollout(sample_id, completion=None, **fields):
    values = {
        "prompt": "1+1=",
        "messages": None,
        "prompt_ids": (1, 2, 3),
        "completion": str(sample_id) if completion is None else completion,
        "completion_ids": (5, 2),
        "logprobs": (-0.5, -0.25),
        "answer": None,
        "metadata": {},
        "policy_version": 0,
        "finish_reason": "stop",
    }
    return Rollout(sample_id=sample_id, **(values | fields))


def number(rollouts) -> list[float]:
    return [float(each.sample_id) for each in rollouts]


def slow_number(rollouts, *, seconds: float = 0.02) -> list[float]:
    time.sleep(seconds)
    return number(rollouts)


def raises(rollouts) -> list[float]:
    raise ValueError("no such judge")


class Serving:
    """A reward's server in this process, on a thread."""

    def __init__(self, score, token, limits):
        self.requests = self.most_at_once = 0
        inside = []

        async def scored(rollouts):
            self.requests += 1
            inside.append(rollouts)
            self.most_at_once = max(self.most_at_once, len(inside))
            try:
                return await asyncio.to_thread(score, rollouts)
            finally:
                inside.pop()

        self.limits = ServerLimits(**limits)
        self.server = WebServer(make_app(scored, self.limits, token=token), self.limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._on_loop(self.server.listen("127.0.0.1", 0, where="test"))
        self.port = int(self.server.address.rpartition(":")[2])
        self.url = f"{self.server.address}/v1/score"

    def _on_loop(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    def stop(self, grace_seconds):
        return self._on_loop(self.server.stop(grace_seconds))

    def close(self):
        self.stop(10.0)
        self._on_loop(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()


def serving(score, *, token=None, **limits):
    """A server in this process, stopped at the end."""
    return closing(Serving(score, token, limits))


class ServedProcess:
    """`rlhf serve-reward` in a process of its own."""

    def __init__(self, *arguments, env=None):
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from rlhf_cli.main import main; main()", "serve-reward", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
        )
        line = self.process.stdout.readline()
        self.url = line.strip().rpartition(" ")[2]
        if not self.url.startswith("http"):
            raise AssertionError(f"not serving: {line!r} {self.process.stderr.read()}")

    @property
    def port(self):
        return int(self.url.split(":")[2].split("/")[0])

    def peak_bytes(self):
        with open(f"/proc/{self.process.pid}/status") as lines:
            (peak,) = [line for line in lines if line.startswith("VmHWM")]
        return int(peak.split()[1]) * 1024

    def stop(self, number=signal.SIGTERM):
        """The exit code, and what it said on stdout and stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, out, err
