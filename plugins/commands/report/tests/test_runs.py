"""`rlhf runs`: what is listed, and that nothing but a finished run is removed."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.main import run
from rlhf_core.runfolder import RunFolder

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs(make_run: Any) -> Path:
    """Three runs, the newest last."""
    for number, name in enumerate(("first", "second", "third/warm-start")):
        folder = make_run(Path("runs", name), episodes=number + 1)
        for file in folder.iterdir():
            os.utime(file, (1.8e9 + number, 1.8e9 + number))
    return Path("runs")


def summarize(folder: Path, **values: object) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | values))


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_list_has_the_newest_run_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "first" / "config.yaml").write_text("{algorithm: {name: grpo}, train: {episodes: 5}}")
    os.utime(runs / "first" / "config.yaml", (0, 0))
    assert run(["runs", "list"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "STATUS", "ALGORITHM", "EPISODES", "HELD-OUT", "REWARD", "CHANGED", "SIZE"]
    assert [line.split()[0] for line in lines] == ["third/warm-start", "second", "first"]
    assert lines[2].split()[1:7] == ["done", "grpo", "1/5", "0.455", "->", "0.923"] and lines[2].endswith("kB")
    assert run(["runs", "list", "runs/second", "--json"]) == 0
    (second,) = json.loads(capsys.readouterr().out)
    assert (second["name"], second["episode"], second["episodes"], second["eval_after"]) == ("second", 2, None, 0.923)
    assert second["size_bytes"] == sum(file.stat().st_size for file in (runs / "second").iterdir())


def test_a_folder_without_runs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert run(["runs", "list", "empty"]) == 0
    assert capsys.readouterr().out == "no runs in empty\n"
    assert run(["runs", "list"]) == 2
    assert "'runs' does not exist" in capsys.readouterr().err


def test_a_killed_run_is_listed_as_killed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summarize(runs / "first", status="running", pid=2**22 + 1, host=socket.gethostname())
    assert run(["runs", "list", "runs/first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["status"] == "killed"


def test_a_name_cannot_control_the_terminal(make_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/\x1b[2J"), episodes=1)
    assert run(["runs", "list"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_runs_are_removed_after_a_question(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "n\n")
    assert run(["runs", "remove", "runs/first", "runs/second"]) == 0
    out = capsys.readouterr().out
    assert "Remove these 2 runs (" in out and "runs/second  done" in out and "nothing was removed" in out
    answer(monkeypatch, "")
    assert run(["runs", "remove", "runs/first"]) == 2
    assert "add --yes" in capsys.readouterr().err and (runs / "first" / "summary.json").exists()
    answer(monkeypatch, "y\n")
    assert run(["runs", "remove", "runs/first", "runs/second/", "runs/first"]) == 0
    assert sorted(each.name for each in runs.iterdir()) == ["third"]


def test_links_in_a_run_are_not_followed(runs: Path) -> None:
    outside = Path("outside")
    outside.mkdir()
    (outside / "file").write_text("keep")
    (runs / "first" / "checkpoints").mkdir()
    (runs / "first" / "checkpoints" / "last").symlink_to(outside.resolve())
    (runs / "first" / "model").symlink_to(outside.resolve())
    (runs / "first" / "plot-kl.png").symlink_to((outside / "file").resolve())
    assert run(["runs", "remove", "runs/first", "--yes"]) == 0
    assert not (runs / "first").exists() and (outside / "file").read_text() == "keep"


def refused(capsys: pytest.CaptureFixture[str], *paths: str) -> str:
    assert run(["runs", "remove", "--yes", *paths]) == 2
    return capsys.readouterr().err


def test_what_is_not_a_run_is_refused_before_anything_is_removed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = Path("project")
    project.mkdir()
    (project / "config.yaml").write_text("mine: 1")
    Path("link").symlink_to(runs / "second")
    assert "lacks .lock" in refused(capsys, "runs/first", "project")
    assert "does not contain a run" in refused(capsys, "runs/first", "runs")
    assert "does not contain a run" in refused(capsys, "runs/first", "runs/none")
    assert "is a link, not a run folder" in refused(capsys, "runs/first", "link")
    (runs / "second" / "metrics.jsonl").unlink()
    (runs / "second" / "metrics.jsonl").symlink_to(project / "config.yaml")
    assert "is a symbolic link" in refused(capsys, "runs/first", "runs/second")
    assert (runs / "first" / "summary.json").exists() and (project / "config.yaml").exists()


def test_a_folder_that_is_more_than_a_run_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", "runs/second"], check=True, timeout=60)
    assert "contains a git repository" in refused(capsys, "runs/second")
    (runs / "first" / "work").mkdir()
    monkeypatch.chdir(runs / "first" / "work")
    assert "contains the current folder" in refused(capsys, "..")


def test_files_that_are_not_of_the_run_are_named_before_they_are_removed(
    runs: Path, make_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = runs / "first"
    (project / "src").mkdir()
    (project / "prompts.jsonl").write_text("{}")
    make_run(project / "other", episodes=1)
    make_run(project / "warm-start", episodes=1)  # a stage: `model.path` of the config
    problem = "also contains other, prompts.jsonl, src, which may not be of the run"
    assert f"runs/first: {problem}" in refused(capsys, "runs/second", "runs/first")
    assert (runs / "second").exists()
    answer(monkeypatch, "n\n")
    assert run(["runs", "remove", "runs/first"]) == 0
    assert f"runs/first {problem}" in capsys.readouterr().out and (project / "prompts.jsonl").exists()
    answer(monkeypatch, "y\n")
    assert run(["runs", "remove", "runs/first"]) == 0
    assert not project.exists()


def test_a_running_run_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder.take(runs / "first", is_new=False):
        err = refused(capsys, "runs/second", "runs/first")
    assert f"is in use by process {os.getpid()}" in err and "rlhf control runs/first stop" in err
    with RunFolder.take(runs / "second" / "warm-start"):
        (runs / "second" / "warm-start" / "metrics.jsonl").touch()
        assert "runs/second/warm-start: is in use" in refused(capsys, "runs/second")
    summarize(runs / "first", status="running", pid=7, host="another-machine")
    assert "may be running as process 7 on another-machine" in refused(capsys, "runs/first")
    assert all((runs / name / "summary.json").exists() for name in ("first", "second"))


def test_an_aborted_removal_can_be_repeated(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "first" / "model").mkdir()

    def broken(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_report.removal.shutil.rmtree", broken)
        assert "runs/first/model cannot be removed: Permission denied" in refused(capsys, "runs/first")
    for name in ("manifest.json", "config.yaml"):
        assert (runs / "first" / name).exists()
    for path in runs.glob("first/*.jsonl"):
        path.unlink()
    assert run(["runs", "remove", "runs/first", "--yes"]) == 0
    assert not (runs / "first").exists()
