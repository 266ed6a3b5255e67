"""Forked workers of `quick_ray` live and die with what the raylet started in their place."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import quick_ray
from running import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("ray_worker_source")
STUB = Path(quick_ray.__file__).with_name("ray_worker_stub.py")
WORKER = """
import os, sys, time
from pathlib import Path

Path("said.part").write_text(f"{os.getpid()} {os.environ['OF_THE_STUB']} {sys.argv[1:]}")
os.rename("said.part", "said")
time.sleep(0 if "leave" in sys.argv else 600)
sys.exit(3)
"""


def start(folder: Path, *arguments: str, source: str | None = None) -> tuple[subprocess.Popen[bytes], int, str]:
    """The stub, and what the worker said: its process, and what else it sees."""
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, str(STUB), str(folder / "worker.py"), "--language=PYTHON", *arguments]
    asked = {quick_ray.ADDRESS: source} if source else {}
    stub = subprocess.Popen(command, cwd=folder, env={**os.environ, "OF_THE_STUB": "yes", **asked})
    wait_until((folder / "said").exists, "a word of the worker")
    pid, said = (folder / "said").read_text().split(" ", 1)
    return stub, int(pid), said


def test_a_worker_is_another_process_with_the_stubs_place_and_its_end_is_the_stubs(tmp_path: Path) -> None:
    stub, pid, said = start(tmp_path, "leave")
    assert said == "yes ['leave']"
    assert pid not in (stub.pid, os.getpid())
    assert stub.wait(PATIENCE_SECONDS) == 3
    assert not psutil.pid_exists(pid)


def test_a_killed_worker_ends_its_stub(tmp_path: Path) -> None:
    stub, pid, _ = start(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert stub.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_killed_stub_ends_its_worker(tmp_path: Path) -> None:
    stub, pid, _ = start(tmp_path)
    stub.kill()
    stub.wait(PATIENCE_SECONDS)
    wait_until(lambda: not psutil.pid_exists(pid), "the worker's end")


@pytest.mark.slow
def test_a_stub_and_its_worker_may_end_at_once(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        stub, pid, _ = start(tmp_path / name)
        os.kill(stub.pid, signal.SIGSTOP)  # both are dead before the source looks at either
        os.kill(pid, signal.SIGKILL)
        stub.kill()
        stub.wait(PATIENCE_SECONDS)
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), "the worker's end")


def test_a_stub_that_goes_without_a_word_does_no_harm(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.connect(os.environ[quick_ray.ADDRESS])
    stub, _, _ = start(tmp_path, "leave")
    assert stub.wait(PATIENCE_SECONDS) == 3


@pytest.mark.slow
def test_a_stub_that_finds_no_source_becomes_the_worker(tmp_path: Path) -> None:
    stub, pid, said = start(tmp_path, "leave", source=str(tmp_path / "nobody"))
    assert (pid, said) == (stub.pid, "yes ['leave']")
    assert stub.wait(PATIENCE_SECONDS) == 3
