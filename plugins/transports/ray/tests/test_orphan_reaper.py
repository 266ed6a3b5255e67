"""What is left of a Ray is ended when its driver goes; what else the driver has started is not touched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from running import wait_until

from rlhf_ray.cluster import Connection
from rlhf_ray.orphan_reaper import watched

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


def test_a_ray_and_what_it_started_are_ended_and_nothing_else(stack: ExitStack, tmp_path: Path) -> None:
    before = start(stack, SLEEP)
    with watched() as has_started:
        root = start(stack, [sys.executable, "-I", "-S", "-c", PARENT, str(tmp_path / "pid")])
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the root's child")
        has_started()
        later = start(stack, SLEEP)
    below = int((tmp_path / "pid").read_text())
    assert root.wait(0) == -9
    wait_until(lambda: not psutil.pid_exists(below), "the end of the root's child")
    assert before.poll() is None
    assert later.poll() is None


def test_a_ray_that_never_came_up_is_ended(stack: ExitStack) -> None:
    before = start(stack, SLEEP)
    with watched():
        root = start(stack, SLEEP)
        wait_until(lambda: psutil.Process(root.pid).status() == psutil.STATUS_SLEEPING, "the root")
    assert root.wait(30) == -9
    assert before.poll() is None


def test_a_connection_names_the_process_that_is_gone(stack: ExitStack) -> None:
    with watched() as has_started:
        root = start(stack, SLEEP)
        (process,) = has_started()
        connection = Connection("a-namespace", {process: "raylet"})
        assert connection.lost() is None
        root.kill()
        wait_until(lambda: connection.lost() == "raylet", "the end of the process")
    assert Connection("a-namespace").lost() is None
