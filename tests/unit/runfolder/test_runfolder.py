from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from rlhf_core.errors import DataError, UserInputError
from rlhf_core.runfolder.folder import RunFolder, default_path, find_newest


def test_create_then_write_then_open_again(tmp_path: Path):
    with RunFolder.take(tmp_path / "a" / "run") as folder:
        folder.write_config({"algorithm": {"name": "ppo"}, "text": "ä"})
        folder.write_manifest({"seed": 3})
        folder.write_summary({"status": "done", "eval_before": 0.4, "eval_after": None})
    with RunFolder.take(tmp_path / "a" / "run", is_new=False) as folder:
        assert folder.read_config() == {"algorithm": {"name": "ppo"}, "text": "ä"}
        assert folder.read_json(folder.manifest) == {"seed": 3}
        assert folder.read_json(folder.summary) == {"status": "done", "eval_before": 0.4, "eval_after": None}


@pytest.mark.parametrize("left", ["config.yaml", "manifest.json", "metrics.jsonl"])
def test_a_folder_with_a_run_is_refused(tmp_path: Path, left: str):
    (tmp_path / left).write_text("")
    with pytest.raises(UserInputError, match="already contains a run.*\n.*--resume auto.*--output") as caught:
        RunFolder.take(tmp_path)
    assert caught.value.exit_code == 2
    RunFolder.take(tmp_path, is_new=False).close()  # and the refusal left no lock behind


def test_a_folder_with_other_files_is_taken(tmp_path: Path):
    (tmp_path / "warm-start").mkdir()
    RunFolder.take(tmp_path).close()


def test_read_needs_a_run(tmp_path: Path):
    for path in (tmp_path, tmp_path / "not-there"):
        with pytest.raises(UserInputError, match="does not contain a run"):
            RunFolder.read(path)
    assert not (tmp_path / "not-there").exists()


def test_a_file_in_the_way_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match="cannot be written"):
        RunFolder.take(tmp_path / "file")


HOLD = """
import sys
from pathlib import Path
from rlhf_core.runfolder.folder import RunFolder
folder = RunFolder.take(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_share_a_folder_and_a_killed_one_frees_it(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserInputError, match=f"another process \\(pid {holder.pid}\\)"):
            RunFolder.take(tmp_path)
        holder.kill()
    RunFolder.take(tmp_path).close()


def test_reading_needs_no_lock(tmp_path: Path):
    with RunFolder.take(tmp_path) as folder:
        folder.write_config({})
        assert RunFolder.read(tmp_path).read_config() == {}


def test_broken_files_are_named(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.read_json(folder.summary) == {}
    assert folder.read_config() == {}
    folder.summary.write_text("{")
    folder.manifest.write_text("[]")
    folder.config.write_text("a: [")
    with pytest.raises(DataError, match=r"summary\.json"):
        folder.read_json(folder.summary)
    with pytest.raises(DataError, match=r"manifest\.json"):
        folder.read_json(folder.manifest)
    with pytest.raises(DataError, match=r"config\.yaml"):
        folder.read_config()


def test_default_path_and_newest(tmp_path: Path):
    now = datetime(2026, 3, 4, 5, 6, 7)
    assert find_newest(tmp_path / "runs") is None
    first = default_path("ppo", now, tmp_path / "runs")
    assert first.name == "ppo-20260304-050607"
    for age, path in ((20, first), (10, first.with_name("older-name"))):
        with RunFolder.take(path) as folder:
            folder.write_config({})
            stamp = now.timestamp() - age
            os.utime(folder.config, (stamp, stamp))
    (tmp_path / "runs" / "not-a-run").mkdir()
    assert default_path("ppo", now, tmp_path / "runs").name == "ppo-20260304-050607-2"
    assert find_newest(tmp_path / "runs") == first.with_name("older-name")


def test_the_log_takes_what_is_said_meanwhile(tmp_path: Path):
    logger = logging.getLogger("rlhf.test")
    folder = RunFolder(tmp_path)
    with folder.logging():
        logger.debug("inside")
    logger.warning("after")
    assert "DEBUG rlhf.test: inside" in folder.log.read_text()
    assert "after" not in folder.log.read_text()


def test_summary_is_plain_json(tmp_path: Path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError):
        folder.write_summary({"status": "failed", "eval_before": float("nan")})
    assert not folder.summary.exists()
    folder.write_summary({"status": "failed"})
    assert json.loads(folder.summary.read_text())["status"] == "failed"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_log_that_finds_no_room_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with RunFolder.take(tmp_path / "run") as folder:
        monkeypatch.setattr(folder, "log", Path("/dev/full"))
        with folder.logging():
            logging.getLogger("rlhf").error("said")
    assert "Traceback" not in capsys.readouterr().err


OWN_FILES = (
    ".lock",
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "run.log",
    "performance.json",
)


class TestAFolderOfAStranger:
    @pytest.mark.parametrize("name", [*OWN_FILES, "control"])
    @pytest.mark.parametrize("take", [RunFolder.take, RunFolder.read])
    def test_no_link_is_followed(self, tmp_path: Path, name: str, take: Callable[[Path], RunFolder]):
        target = tmp_path / "target"
        target.write_text("mine")
        folder = tmp_path / "run"
        folder.mkdir()
        if take is not RunFolder.take:
            (folder / "checkpoints").mkdir()
        (folder / name).symlink_to(target)
        with pytest.raises(UserInputError, match="is a symbolic link"):
            take(folder)
        assert target.read_text() == "mine"

    @pytest.mark.parametrize("name", OWN_FILES)
    def test_no_pipe_is_waited_for(self, tmp_path: Path, name: str):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserInputError, match="is a pipe"):
            RunFolder.take(tmp_path)
        assert not RunFolder(tmp_path).is_in_use

    def test_a_link_put_there_meanwhile_gets_no_log(self, tmp_path: Path):
        target = tmp_path / "target"
        with RunFolder.take(tmp_path / "run") as folder:
            folder.log.symlink_to(target)
            with pytest.raises(OSError), folder.logging():
                pass
        assert not target.exists()

    def test_a_file_is_not_replaced_through_a_link(self, tmp_path: Path):
        target = tmp_path / "target"
        target.write_text("mine")
        (tmp_path / ".summary.json.tmp").symlink_to(target)
        RunFolder(tmp_path).write_summary({"status": "running"})
        assert target.read_text() == "mine"


def test_a_run_folder_is_its_users_alone(tmp_path: Path):
    with RunFolder.take(tmp_path / "runs" / "first") as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other", ["model", "samples.jsonl"])
def test_files_of_the_user_that_a_run_would_replace_are_refused(tmp_path: Path, other: str):
    """Such as the model beside a run file, with `--output .`."""
    (tmp_path / other).mkdir() if other == "model" else (tmp_path / other).touch()
    with pytest.raises(UserInputError, match=f"contains {other} without a run, which a new run would replace"):
        RunFolder.take(tmp_path)
    assert [each.name for each in tmp_path.iterdir() if each.name != ".lock"] == [other]
