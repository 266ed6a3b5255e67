"""`ray.json` may be anyone's: what it says is checked. What the commands ask of a driver."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhf_core.errors import DeadlineError, UserInputError
from rlhf_core.runfolder import RunFolder
from rlhf_ray.commands import ray
from rlhf_ray.driver_files import read_status, take_request


def write(folder: Path, **changes: Any) -> Path:
    values = {
        "driver_pid": os.getpid(),
        "host": socket.gethostname(),
        "address": "127.0.0.1:1",
        "namespace": "rlhf",
        "updated": 1.0,
        "version": 0,
        "progress": "episode 1",
        "trainers": [{"name": "trainer-0", "pid": 5, "node": "n", "restarts": 2}],
        "makers": [{"name": "m", "pid": 6, "node": "n", "doing": "waits", "for_s": 1.5, "version": 0, "restarts": 1}],
        **changes,
    }
    path = folder / "ray.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("text", ["{}", "[]", "", "{", "[" * 10**5, '{"driver_pid": ' + "9" * 5000 + "}", "\udcff"])
def test_a_malformed_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "ray.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UserInputError, match="not written by a driver"):
        read_status(tmp_path)


def test_a_link_or_pipe_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path).rename(tmp_path / "other")
    (tmp_path / "ray.json").symlink_to(path)
    with pytest.raises(UserInputError, match="not a regular file"):
        read_status(tmp_path)
    (tmp_path / "ray.json").unlink()
    os.mkfifo(tmp_path / "ray.json")
    with pytest.raises(UserInputError, match="not a regular file"):
        read_status(tmp_path)


def test_a_maker_that_has_no_weights_yet_is_shown(tmp_path: Path) -> None:
    maker = {"name": "maker-0", "pid": 6, "node": "n", "doing": "waits", "for_s": 0, "version": None, "restarts": 0}
    write(tmp_path, makers=[maker])
    with RunFolder.take(tmp_path):
        shown = CliRunner().invoke(ray, ["status", str(tmp_path)])
    assert shown.exit_code == 0
    assert "maker-0  pid 6  waits (for 0 s)  no weights yet" in shown.output


def test_stop_sends_no_process_a_signal_but_asks_the_driver_which_is_gone_when_the_folder_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda _, signal: signal and pytest.fail("a signal"))
    folder = RunFolder.take(tmp_path / "run")
    write(folder.path)
    asked: list[Any] = []

    def drive() -> None:
        while not asked or asked[-1] is None:
            asked.append(take_request(folder.path))
        folder.close()

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    stopped = CliRunner().invoke(ray, ["stop", str(folder.path), "--now", "--timeout", "60"])
    driver.join()
    assert (stopped.exit_code, stopped.output) == (0, f"{folder.path}: stopped\n")
    assert asked[-1].do == "stop-now"


def test_a_driver_that_goes_on_is_waited_for_with_a_deadline(tmp_path: Path) -> None:
    with RunFolder.take(tmp_path / "run") as folder:
        write(folder.path)
        error = CliRunner().invoke(ray, ["stop", str(folder.path), "--timeout", "0.1"]).exception
    assert isinstance(error, DeadlineError)


def test_what_a_killed_driver_left_is_removed(tmp_path: Path) -> None:
    path = write(tmp_path)
    stopped = CliRunner().invoke(ray, ["stop", str(tmp_path)])
    assert stopped.exit_code == 0 and "was killed" in stopped.output
    assert not path.exists()


def test_status_shows_what_a_driver_wrote(tmp_path: Path) -> None:
    write(tmp_path)
    with RunFolder.take(tmp_path):
        shown = CliRunner().invoke(ray, ["status", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "waits (for 1.5 s)  version 0  restarted 1 times" in shown.output
    assert "trainer-0  pid 5  loads its models (for 0 s)  restarted 2 times" in shown.output


def test_a_driver_elsewhere_that_says_nothing_any_more_is_not_called_stopped(tmp_path: Path) -> None:
    write(tmp_path, host="another", updated=0.0)
    error = CliRunner().invoke(ray, ["stop", str(tmp_path)]).exception
    assert isinstance(error, UserInputError) and "on another) has not responded" in str(error)
    assert not (tmp_path / "ray-request.json").exists()


def test_a_folder_that_a_later_run_without_ray_holds_has_no_driver(tmp_path: Path) -> None:
    path = write(tmp_path, driver_pid=2**22 + 1)  # above Linux's largest
    with RunFolder.take(tmp_path):
        shown = CliRunner().invoke(ray, ["stop", str(tmp_path)])
    assert shown.exit_code == 0 and "was killed" in shown.output
    assert not path.exists()
