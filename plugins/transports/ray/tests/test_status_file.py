"""`ray.json` may be anyone's: what it says is checked before a process is sent a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhf_core.errors import UserInputError
from rlhf_ray.commands import ray
from rlhf_ray.status_file import read_status, start_time


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Someone's process, which no run drives."""
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    yield sleeper
    sleeper.kill()
    sleeper.wait()


def write(folder: Path, **changes: Any) -> Path:
    values = {
        "driver_pid": os.getpid(),
        "driver_start": start_time(os.getpid()),
        "host": socket.gethostname(),
        "address": "127.0.0.1:1",
        "namespace": "rlhf",
        "updated": 1.0,
        "version": 0,
        "progress": "episode 1",
        "trainers": [{"name": "trainer-0", "pid": 5, "node": "n"}],
        "makers": [{"name": "m", "pid": 6, "node": "n", "doing": "waits", "for_s": 1.5, "version": 0, "restarts": 1}],
        **changes,
    }
    path = folder / "ray.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("pid", [-1, 0, 1, "3", 1.5, None])
def test_an_id_that_means_many_processes_or_none_is_an_error(tmp_path: Path, pid: Any) -> None:
    write(tmp_path, driver_pid=pid)
    with pytest.raises(UserInputError, match="driver_pid"):
        read_status(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "", "{", "[" * 10**5, '{"driver_pid": ' + "9" * 5000 + "}", "\udcff"])
def test_a_malformed_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "ray.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UserInputError, match="not what a driver writes"):
        read_status(tmp_path)


def test_a_link_or_pipe_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path).rename(tmp_path / "other")
    (tmp_path / "ray.json").symlink_to(path)
    with pytest.raises(UserInputError, match="no regular file"):
        read_status(tmp_path)
    (tmp_path / "ray.json").unlink()
    os.mkfifo(tmp_path / "ray.json")
    with pytest.raises(UserInputError, match="no regular file"):
        read_status(tmp_path)


def test_a_maker_that_has_no_weights_yet_is_shown(tmp_path: Path) -> None:
    maker = {"name": "maker-0", "pid": 6, "node": "n", "doing": "waits", "for_s": 0, "version": None, "restarts": 0}
    write(tmp_path, makers=[maker])
    shown = CliRunner().invoke(ray, ["status", str(tmp_path)])
    assert shown.exit_code == 0
    assert "maker-0  pid 6  waits since 0 s  no weights yet" in shown.output


@pytest.mark.parametrize("start", [None, "1", "not a time"])
def test_a_process_of_that_id_that_started_at_another_time_gets_no_signal(
    tmp_path: Path, process: subprocess.Popen[bytes], start: str | None
) -> None:
    write(tmp_path, driver_pid=process.pid, driver_start=start)
    found = read_status(tmp_path)
    assert found is not None
    with pytest.raises(UserInputError, match="is not this run's driver"):
        found.interrupt()
    CliRunner().invoke(ray, ["stop", str(tmp_path)])
    assert process.poll() is None


def test_another_users_process_gets_no_signal(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, driver_pid=process.pid, driver_start=start_time(process.pid))
    found = read_status(tmp_path)
    assert found is not None
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(UserInputError, match="another user's"):
            found.interrupt()
    found.interrupt()
    assert process.wait(20) == -signal.SIGINT or process.returncode == 1


def test_status_shows_what_a_driver_wrote(tmp_path: Path) -> None:
    write(tmp_path)
    shown = CliRunner().invoke(ray, ["status", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "waits since 1.5 s  version 0  started anew 1 times" in shown.output
