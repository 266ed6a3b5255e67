"""A run folder has one owner from the first moment to the last, and says at every moment how its run stands."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from run_files import lines, start, tree
from running import PATIENCE_SECONDS

from rlhf_core import train
from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.runfolder.folder import RunFolder
from rlhf_start.stages import run_quickstart
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")
EACH = {"checkpoint": {"every_episodes": 1, "keep": 10}}
TWO = {"strategy": "ddp"}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


class Each:
    """Calls a function at the start of each episode."""

    def __init__(self, function):
        self.function = function

    def rlhf_episode_start(self, episode):
        self.function(episode)


def once(monkeypatch, name, function):
    """Call `function` just before the first call of `name`."""
    module, _, attribute = name.rpartition(".")
    real, called = getattr(sys.modules[module], attribute), []

    def first(*arguments):
        if not called:
            called.append(True)
            function()
        return real(*arguments)

    monkeypatch.setattr(name, first)


# Who owns it


def test_the_loser_of_the_lock_touches_nothing(tmp_path, monkeypatch):
    output, flock, held = tmp_path / "run", fcntl.flock, []

    def win():
        held.append((output / ".lock").open("a+"))
        flock(held[0], fcntl.LOCK_EX)
        (output / "config.yaml").write_text("a: 1\n")
        (output / "metrics.jsonl").write_text('{"step": 1}\n')

    once(monkeypatch, "fcntl.flock", win)
    with pytest.raises(UserInputError, match="another process"):
        start({}, output)
    assert (output / "config.yaml").read_text() == "a: 1\n"
    assert len(lines(output / "metrics.jsonl")) == 1
    held[0].close()


def test_a_lock_whose_file_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    once(monkeypatch, "fcntl.flock", lambda: shutil.rmtree(tmp_path / "run"))
    with RunFolder.take(tmp_path / "run"):
        assert RunFolder(tmp_path / "run").is_in_use
        with pytest.raises(UserInputError, match="another process"):
            RunFolder.take(tmp_path / "run")


@pytest.mark.parametrize("resume", [None, "auto"])
def test_the_launcher_owns_the_folder_as_long_as_its_processes_run(tmp_path, monkeypatch, resume):
    output, seen = tmp_path / "run", []
    if resume is not None:
        start(EACH, output)

    def run_in_processes(*arguments):
        with pytest.raises(UserInputError, match=f"another process \\(pid {os.getpid()}\\)"):
            start({}, output, resume="auto")
        seen.append(summary(output))
        raise RlhfError("rank 0 was ended by SIGKILL")

    monkeypatch.setattr("rlhf_strategies.run_processes.run_in_processes", run_in_processes)
    with pytest.raises(RlhfError, match="SIGKILL"):
        start({**EACH, **TWO}, output, resume=resume, num_processes=2)
    assert (seen[0]["status"], seen[0]["pid"], seen[0]["host"]) == ("running", os.getpid(), socket.gethostname())
    assert summary(output)["status"] == "failed"
    assert not RunFolder(output).is_in_use


def test_the_quickstart_owns_its_folder_from_the_warm_start_on(tmp_path):
    output, seen = tmp_path / "run", []

    def look(episode):
        with pytest.raises(UserInputError, match="another process"):
            start({}, output)
        seen.append(summary(output)["status"])

    warm = tiny_run({"algorithm": {"name": "sft"}, "rewards": None, "train": {"samples_per_prompt": 1}})
    result = run_quickstart(warm, tiny_run(), output=output, hooks=[Each(look)])
    assert seen == ["running"] * 4
    assert result.summary["status"] == "done"


# Files that vanish


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.yaml", "manifest.json"])
@pytest.mark.slow_except("config.yaml", "samples.jsonl")
def test_a_run_whose_file_vanishes_fails_by_name(tmp_path, name):
    def remove(episode):
        if episode == 1:
            (tmp_path / "run" / name).unlink()

    with pytest.raises(RlhfError, match=f"{name}.* during the run"):
        start({}, tmp_path / "run", hooks=[Each(remove)])
    assert summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("raised", [None, UserInputError("it is wrong during the run")])
@pytest.mark.parametrize("is_anothers", [False, True])
def test_a_run_whose_folder_vanishes_fails_and_leaves_the_next_one_alone(tmp_path, is_anothers, raised):
    def remove(episode):
        shutil.rmtree(tmp_path / "run")
        if is_anothers:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / ".lock").write_text("1")
            (tmp_path / "run" / "metrics.jsonl").write_text("")
        if raised is not None:
            raise raised

    with pytest.raises(RlhfError, match="during the run"):
        start(EACH, tmp_path / "run", hooks=[Each(remove)])
    assert set(tree(tmp_path)) == ({"run", "run/.lock", "run/metrics.jsonl"} if is_anothers else set())


# What the summary says


def test_a_run_says_from_its_first_moment_that_it_runs(tmp_path):
    seen = []
    look = Each(lambda episode: seen.append(summary(tmp_path / "run")))
    start({**EACH, "eval": {"num_prompts": 4}}, tmp_path / "run", hooks=[look])
    before = summary(tmp_path / "run")
    assert before["status"] == "done"
    start({**EACH, "train": {"episodes": 3}}, tmp_path / "run", resume="auto", hooks=[look])
    assert [each["status"] for each in seen] == ["running"] * 3
    assert {(each["pid"], each["host"]) for each in seen} == {(os.getpid(), socket.gethostname())}
    assert seen[2]["eval_before"] == before["eval_before"] is not None
    assert seen[2]["wall_s"] > 0


def test_a_resume_that_fails_before_its_loop_is_failed(tmp_path, monkeypatch):
    start(EACH, tmp_path / "run")

    def fail(**_):
        raise OSError("no such luck")

    monkeypatch.setattr("rlhf_core.entry.train.HookContext", fail)
    with pytest.raises(OSError, match="no such luck"):
        start(EACH, tmp_path / "run", resume="auto")
    assert summary(tmp_path / "run")["status"] == "failed"


def test_a_full_disk_is_told_and_the_summary_says_failed(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(episode):
        monkeypatch.setattr("rlhf_core.runfolder.folder.write_bytes", full)
        monkeypatch.setattr("rlhf_core.runfolder.folder.write_json", full)
        raise RlhfError("the disk is full")

    with pytest.raises(RlhfError, match="the disk is full"):
        start({}, tmp_path / "run", hooks=[Each(fill)])
    assert summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize(("raised", "says"), [(KeyboardInterrupt, "interrupted"), (SystemExit, "failed")])
def test_the_launcher_settles_what_its_processes_left(tmp_path, monkeypatch, raised, says):
    def run_in_processes(*arguments):
        raise raised

    monkeypatch.setattr("rlhf_strategies.run_processes.run_in_processes", run_in_processes)
    with pytest.raises(raised):
        start(TWO, tmp_path / "run", num_processes=2)
    assert summary(tmp_path / "run")["status"] == says


def test_the_launcher_leaves_nothing_in_the_folder_for_temporary_files(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))

    def start_none(*arguments):
        raise RlhfError("stopped by the test")

    monkeypatch.setattr("rlhf_strategies.ranks.RankGroup.start", start_none)
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(TWO, tmp_path / "run", num_processes=2)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_second_signal_ends_the_processes(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    started = []

    def start_one(command, environment):
        sleeping = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
        started.append(subprocess.Popen(sleeping, env=environment, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1]

    def look(ranks):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("rlhf_strategies.ranks._start_process", start_one)
    monkeypatch.setattr("rlhf_strategies.ranks.RankGroup.poll", look)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run(TWO), output=tmp_path / "run", num_processes=2)
    for process in started:
        assert process.returncode == -signal.SIGTERM
        process.communicate()
    assert len(started) == 2
    assert summary(tmp_path / "run")["status"] == "interrupted"
    assert not list((tmp_path / "tmp").glob("rlhf-*"))


THREE_SIGNALS = """
import atexit, os, signal, sys, threading, time
from rlhf_cli import main
number = getattr(signal, sys.argv[1])

def slow_to_end():
    for _ in range(2):
        os.kill(os.getpid(), number)
        time.sleep(0.1)

def command(**_):
    try:
        os.kill(os.getpid(), number)
        time.sleep(60)
    finally:
        os.kill(os.getpid(), number)
        time.sleep(60)

if sys.argv[2] == "threads":
    threading._register_atexit(slow_to_end)
atexit.register(lambda: print(signal.getsignal(number).name))
main.cli.main = command
main.main([])
"""


@pytest.mark.usefixtures("sighup_not_ignored")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("when", ["threads", "exit"])
def test_however_many_signals_come_the_code_is_130(name, when):
    """Also while threads end; and where Python gives up its handlers, signals have none to fall back to."""
    done = subprocess.run(
        [sys.executable, "-c", THREE_SIGNALS, name, when],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ("" if when == "threads" else "SIG_IGN\n")
