"""What is left of a Ray is ended when its driver goes; what else the driver has started is not touched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import ray
from running import wait_until

from rlhf_core.errors import RlhfError
from rlhf_ray.calls import ActorLostError
from rlhf_ray.cluster import Connection, connect
from rlhf_ray.config import RayConfig
from rlhf_ray.orphan_reaper import reaper

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


@pytest.mark.slow
def test_a_ray_and_what_it_started_are_ended_and_nothing_else(stack: ExitStack, tmp_path: Path) -> None:
    before = start(stack, SLEEP)
    root = start(stack, [sys.executable, "-I", "-S", "-c", PARENT, str(tmp_path / "pid")])
    with reaper([psutil.Process(root.pid)]):
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the root's child")
        later = start(stack, SLEEP)
    below = int((tmp_path / "pid").read_text())
    assert root.wait(30) == -9
    wait_until(lambda: not psutil.pid_exists(below), "the end of the root's child")
    assert before.poll() is None
    assert later.poll() is None


@pytest.mark.slow
def test_a_ray_that_never_came_up_is_ended(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    roots: list[subprocess.Popen[bytes]] = []

    def fails(**options: object) -> None:
        roots.append(start(stack, SLEEP))
        raise RuntimeError("no")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fails)
    before = start(stack, SLEEP)
    with pytest.raises(RlhfError, match="a local Ray cannot be started"), connect(RayConfig()):
        pass
    assert roots[0].wait(30) == -9
    assert before.poll() is None


def test_a_connection_names_the_process_that_is_gone(stack: ExitStack) -> None:
    root = start(stack, SLEEP)
    process = psutil.Process(root.pid)
    connection = Connection("a-namespace", {"raylet": process})
    connection.check()
    root.kill()
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, "the end of the process")
    with pytest.raises(ActorLostError, match="the process raylet of the local Ray exited"):
        connection.check()
    root.wait(30)
    with pytest.raises(ActorLostError, match="the process raylet of the local Ray exited"):
        connection.check()
    Connection("a-namespace").check()
