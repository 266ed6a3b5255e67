"""The two stages of the quickstart, on runs that take a second."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
from run_files import tree
from running import wait_until

from rlhf_cli.main import run as rlhf
from rlhf_control.control_box import ControlBox, parse_command
from rlhf_control.hooks import CONTROL
from rlhf_core.entry.resume import load_run_config
from rlhf_core.errors import InterruptedRun, RlhfError, UserInputError
from rlhf_core.runfolder.folder import RunFolder
from rlhf_start.stages import run_quickstart
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")
WARM_START = tiny_run({"algorithm": {"name": "sft"}, "rewards": None, "train": {"samples_per_prompt": 1}})
PPO = tiny_run({"checkpoint": {"every_episodes": 1}, "eval": {"num_prompts": 4}})


class Interrupt:
    def rlhf_episode_start(self):
        os.kill(os.getpid(), signal.SIGINT)


class Fail:
    def __init__(self, only):
        self.only = only

    def rlhf_episode_end(self, episode, metrics):
        if self.only in metrics:
            raise RlhfError("stopped by the test")


def status(folder):
    return json.loads((folder / "summary.json").read_text())["status"]


def test_both_stages_are_ordinary_runs_in_one_folder(tmp_path):
    result = run_quickstart(WARM_START, PPO, output=tmp_path / "run")
    assert result.run_folder == tmp_path / "run"
    assert status(tmp_path / "run") == status(tmp_path / "run/warm-start") == "done"
    assert "warm-start/model" in (tmp_path / "run/config.yaml").read_text()
    assert result.summary["eval_before"] is not None
    with pytest.raises(UserInputError, match="already contains a run"):
        run_quickstart(WARM_START, PPO, output=tmp_path / "run")


def test_a_finished_warm_start_is_used_again(tmp_path):
    with pytest.raises(RlhfError, match="stopped by the test"):
        run_quickstart(WARM_START, PPO, output=tmp_path / "run", hooks=[Fail("reward/mean")])
    assert status(tmp_path / "run/warm-start") == "done"
    before = tree(tmp_path / "run/warm-start")
    result = run_quickstart(WARM_START, PPO, output=tmp_path / "run", resume="auto")
    assert result.summary["status"] == "done"
    assert tree(tmp_path / "run/warm-start") == before


@pytest.mark.slow
def test_a_teacher_is_made_between_them(tmp_path):
    teacher = {**WARM_START, "train": {**WARM_START["train"], "seed": 5}}
    run = {**PPO, "algorithm": {"name": "distill", "teacher": {"path": "builtin:tiny-digits"}, "top_k": 4}}
    with pytest.raises(RlhfError, match="stopped by the test"):
        run_quickstart(
            WARM_START, run, stages={"teacher": teacher}, output=tmp_path / "run", hooks=[Fail("loss/distill")]
        )
    assert status(tmp_path / "run/teacher") == status(tmp_path / "run/warm-start") == "done"
    before = tree(tmp_path / "run/teacher")
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    config = load_run_config(moved)
    assert config["model"]["path"] == str(moved / "warm-start/model")
    assert config["algorithm"]["teacher"]["path"] == str(moved / "teacher/model")
    result = run_quickstart(WARM_START, run, stages={"teacher": teacher}, output=moved, resume="auto")
    assert result.summary["status"] == "done" and result.metrics[0]["loss/distill"] > 0
    assert tree(moved / "teacher") == before


def test_ctrl_c_in_the_warm_start_says_how_to_go_on(tmp_path):
    with pytest.raises(InterruptedRun) as caught:
        run_quickstart(WARM_START, PPO, output=tmp_path / "run", hooks=[Interrupt()])
    assert f"--output {tmp_path / 'run'} --resume auto:" in str(caught.value)
    assert status(tmp_path / "run") == "interrupted"
    with pytest.raises(UserInputError, match="already contains a run"):
        run_quickstart(WARM_START, PPO, output=tmp_path / "run")
    assert run_quickstart(WARM_START, PPO, output=tmp_path / "run", resume="auto").summary["status"] == "done"


class Control:
    """Sends `rlhf control` to the run once, before update `step` of its first stage, as from another terminal."""

    def __init__(self, folder, word, step):
        self.folder, self.word, self.step = folder, word, step
        self.thread = None

    def rlhf_update_end(self, step):
        if step == self.step and self.thread is None:
            self.thread = threading.Thread(target=rlhf, args=(["control", str(self.folder), self.word],))
            self.thread.start()
            wait_until(lambda: list(self.folder.glob("**/control/*.json")), "the command")


@pytest.mark.parametrize(("step", "where"), [(1, "in"), (2, "after")])
@pytest.mark.slow_except("1-in")
def test_a_stop_during_the_warm_start_stops_the_run(tmp_path, capfd, step, where):
    folder = tmp_path / "run"
    control = Control(folder, "stop", step)
    with pytest.raises(InterruptedRun, match=f"stopped {where} the warm start"):
        run_quickstart(WARM_START, PPO, output=folder, hooks=[control])
    control.thread.join()
    assert f"warm-start: stops at the end of episode {step}" in capfd.readouterr().out
    assert status(folder) == "interrupted" and not (folder / "metrics.jsonl").exists()
    assert run_quickstart(WARM_START, PPO, output=folder, resume="auto").summary["status"] == "done"


class PauseAndResume:
    """Pauses the run with `rlhf control` before its first update, and resumes it half a second later."""

    def __init__(self, folder):
        self.folder, self.codes, self.num_updates = folder, [], []
        self.thread = threading.Thread(target=self.send)

    def rlhf_update_end(self, step):
        if self.thread.ident is None:
            self.thread.start()
            wait_until(lambda: list(self.folder.glob("**/control/*.json")), "the command")

    def send(self):
        self.codes.append(rlhf(["control", str(self.folder), "pause"]))
        for seconds in (0, 0.5):
            time.sleep(seconds)
            self.num_updates.append(len((self.folder / "warm-start/metrics.jsonl").read_text().splitlines()))
        self.codes.append(rlhf(["control", str(self.folder), "resume"]))


@pytest.mark.slow
def test_a_pause_during_the_warm_start_holds_it_until_it_is_resumed(tmp_path, capfd):
    folder = tmp_path / "run"
    control = PauseAndResume(folder)
    result = run_quickstart(WARM_START, PPO, output=folder, hooks=[control])
    control.thread.join()
    assert control.codes == [0, 0] and control.num_updates[0] == control.num_updates[1] < 2
    out = capfd.readouterr().out
    assert "warm-start: paused: `resume` continues the run" in out and "warm-start: resumed" in out
    assert result.summary["status"] == status(folder / "warm-start") == "done"
    assert [event["command"] for event in RunFolder(folder / "warm-start").events(CONTROL)] == ["pause", "resume"]
    assert RunFolder(folder).events(CONTROL) == []


def test_a_checkpoint_during_the_warm_start_is_one_of_the_warm_start(tmp_path, capfd):
    folder = tmp_path / "run"
    control = Control(folder, "checkpoint", 1)
    result = run_quickstart(WARM_START, PPO, output=folder, hooks=[control])
    control.thread.join()
    assert "warm-start: a checkpoint is written at the end of episode 1" in capfd.readouterr().out
    assert (folder / "warm-start/checkpoints/step-1").is_dir()
    assert result.summary["status"] == status(folder / "warm-start") == "done"
    assert RunFolder(folder).events(CONTROL) == []


def test_a_command_that_reaches_no_update_of_the_warm_start_is_kept_for_the_last_stage(tmp_path):
    box = ControlBox(tmp_path / "run" / "control")

    class Send:
        sent = None

        def rlhf_episode_start(self):
            self.sent = self.sent or box.send(parse_command(["checkpoint"]))

    send = Send()
    run_quickstart(WARM_START, PPO, output=tmp_path / "run", hooks=[send])
    answer = box.wait(send.sent, seconds=0, is_running=lambda: False)
    assert answer == "a checkpoint is written at the end of episode 1"


def test_a_purged_folder_is_refused_before_a_stage_is_made_again(tmp_path):
    folder = tmp_path / "run"
    run_quickstart(WARM_START, PPO, output=folder)
    for path in (*folder.glob("checkpoints/step-*"), folder / "warm-start"):
        shutil.rmtree(path)
    with pytest.raises(UserInputError, match="is missing"):
        run_quickstart(WARM_START, PPO, output=folder, resume="auto")
    assert status(folder) == "done" and not (folder / "warm-start").exists()


def test_a_dry_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_quickstart(WARM_START, PPO, dry_run=True) is None
    assert run_quickstart(WARM_START, PPO, output=tmp_path / "run", dry_run=True) is None
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_second_stage_is_told_before_the_first(tmp_path):
    with pytest.raises(UserInputError, match="exact-match"):
        run_quickstart(WARM_START, {**PPO, "rewards": [{"name": "exact-mach"}]}, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
