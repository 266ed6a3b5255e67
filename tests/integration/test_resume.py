"""A run that was stopped and continued is the run that was not."""

import json
import os
import shutil
import signal
import time
from contextlib import contextmanager

import pytest
from run_files import metrics, samples, start, write_run
from running import ended, rlhf, wait_until

from rlhf_core.errors import InterruptedRun, RlhfError, UserInputError

TRAIN = {"episodes": 4, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {
    "train": TRAIN,
    "checkpoint": {"every_episodes": 1, "keep": 10},
    "eval": {"every_episodes": 2, "num_prompts": 4},
}
LONG = {**BASE, "train": {**TRAIN, "episodes": 400}}
SCHEDULE = {"lr": 1e-3, "critic_lr": 2e-3, "schedule": "linear", "warmup_episodes": 1}

VARIANTS = {
    "adaptive KL, normalised rewards, schedule and epochs": {
        "algorithm": {"name": "ppo", "kl_controller": "adaptive", "kl_target": 0.01},
        "rewards": [{"name": "length", "target_tokens": 2}],
        "reward_scaling": {"normalise": True},
        "optimizer": SCHEDULE,
        "train": {**TRAIN, "epochs_per_episode": 2},
    },
    "curriculum": {
        "rewards": [{"name": "length", "target_tokens": 2}],
        "prompts": {
            "name": "sort-digits",
            "num_digits": 2,
            "size": 14,
            "curriculum": {"success": [0.3, 0.9], "success_score": 0.2, "revisit_after": 1, "retire_after": 2},
        },
    },
}
"""Each state that a run keeps between episodes is in one of them."""


class StopAfter:
    """Fails the run once an episode is over and its checkpoint written."""

    def __init__(self, episode):
        self.episode = episode

    def rlhf_episode_end(self, episode):
        if episode == self.episode:
            raise RlhfError("stopped by the test")


def stopped_after(changes, output, episode):
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(changes, output, hooks=[StopAfter(episode)])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The plain run, never stopped."""
    return start(BASE, tmp_path_factory.mktemp("straight") / "run")


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.slow_except("adaptive KL, normalised rewards, schedule and epochs")
def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path, variant):
    changes = {**BASE, **VARIANTS[variant]}
    straight = start(changes, tmp_path / "straight")
    stopped_after(changes, tmp_path / "stopped", 1)
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["status"] == "failed"
    resumed = start(changes, tmp_path / "stopped", resume="auto")
    assert metrics(resumed.run_folder) == metrics(straight.run_folder)
    assert samples(resumed.run_folder) == samples(straight.run_folder)
    for key in ("status", "eval_before", "eval_after"):
        assert resumed.summary[key] == straight.summary[key]
    assert same_model(straight.run_folder, resumed.run_folder)


def same_model(one, other):
    return (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
def test_what_came_after_the_checkpoint_is_cut(tmp_path, straight):
    folder = tmp_path / "copy"
    shutil.copytree(straight.run_folder, folder)
    resumed = start(BASE, folder, resume=str(folder / "checkpoints" / "step-4"))
    assert metrics(folder) == metrics(straight.run_folder)
    assert samples(folder) == samples(straight.run_folder)
    assert (folder / "checkpoints/last").read_text().strip() == "step-8"
    assert resumed.summary["status"] == "done"


@pytest.mark.usefixtures("no_plots")
def test_last_points_at_a_checkpoint_that_is_there_even_before_the_first_new_one(tmp_path, straight):
    folder = tmp_path / "copy"
    shutil.copytree(straight.run_folder, folder)
    checkpoints = folder / "checkpoints"
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(BASE, folder, resume=str(checkpoints / "step-2"), hooks=[StopAtOnce()])
    assert (checkpoints / "last").read_text().strip() == "step-2"


class StopAtOnce:
    def rlhf_fit_start(self):
        raise RlhfError("stopped by the test")


@pytest.mark.usefixtures("no_plots")
def test_a_damaged_checkpoint_is_skipped(tmp_path, straight):
    stopped_after(BASE, tmp_path / "stopped", 2)
    damaged = tmp_path / "stopped/checkpoints/step-6/policy/model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    resumed = start(BASE, tmp_path / "stopped", resume="auto")
    assert metrics(resumed.run_folder) == metrics(straight.run_folder)


@pytest.mark.usefixtures("no_plots")
def test_a_finished_run_resumed_stays_as_it_is(tmp_path, straight, caplog):
    folder = tmp_path / "copy"
    shutil.copytree(straight.run_folder, folder)
    again = start(BASE, folder, resume="auto")
    assert "episodes are trained already" in caplog.text
    assert metrics(folder) == metrics(straight.run_folder)
    for key in ("status", "eval_before", "eval_after"):
        assert again.summary[key] == straight.summary[key]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(tmp_path, straight):
    longer = {**BASE, "train": {**TRAIN, "episodes": 5}}
    whole = start(longer, tmp_path / "whole")
    shutil.copytree(straight.run_folder, tmp_path / "copy")
    resumed = start(longer, tmp_path / "copy", resume="auto")
    assert samples(resumed.run_folder) == samples(whole.run_folder)
    assert metrics(resumed.run_folder)[8:] == metrics(whole.run_folder)[8:]


def test_nothing_to_resume_is_the_users_mistake(tmp_path):
    with pytest.raises(UserInputError, match="no checkpoint to continue from"):
        start(BASE, tmp_path / "run", resume="nowhere")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_one_run_is_not_gone_on_with_in_anothers_folder(tmp_path, straight):
    """Whose own lines it would cut."""
    other = tmp_path / "other"
    shutil.copytree(straight.run_folder, other)
    before = (other / "metrics.jsonl").read_text()
    for resume in (straight.run_folder, straight.run_folder / "checkpoints" / "step-4"):
        with pytest.raises(UserInputError, match="continues in .*, not in .*\n.*--from"):
            start(BASE, other, resume=str(resume))
    assert (other / "metrics.jsonl").read_text() == before


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
def test_an_interrupt_asked_for_in_a_hook_writes_a_checkpoint(tmp_path, straight):
    with pytest.raises(InterruptedRun, match="A checkpoint and the model are written"):
        start({**BASE, "checkpoint": {"every_episodes": None}}, tmp_path / "run", hooks=[InterruptIn(1)])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["eval_before"] == straight.summary["eval_before"]
    resumed = start(BASE, tmp_path / "run", resume="auto")
    assert metrics(resumed.run_folder) == metrics(straight.run_folder)
    assert samples(resumed.run_folder) == samples(straight.run_folder)


class InterruptIn:
    def __init__(self, episode):
        self.episode = episode

    def rlhf_episode_start(self, episode):
        if episode == self.episode:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("no_plots")
class TestProcesses:
    @contextmanager
    def begun(self, tmp_path, changes):
        """`rlhf train` in a process of its own, with two checkpoints on disk."""
        folder = tmp_path / "run"
        process = rlhf("train", write_run(tmp_path, changes), "--output", folder, plots=True)

        def saved():
            process.assert_runs()
            return len(list(folder.glob("checkpoints/step-*/files.json"))) >= 2

        with ended(process):
            wait_until(saved, "two checkpoints", every_seconds=0.02)
            yield process, folder

    def go_on(self, folder, episodes):
        changes = {**LONG, "train": {**TRAIN, "episodes": episodes}}
        resumed = start(changes, folder, resume="auto")
        whole = start(changes, folder.parent / "whole")
        assert metrics(folder) == metrics(whole.run_folder)
        assert samples(folder) == samples(whole.run_folder)
        assert resumed.summary["status"] == "done"

    def episodes_to_go(self, folder):
        newest = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
        return newest // 2 + 2

    @pytest.mark.slow
    def test_a_run_that_is_killed_goes_on(self, tmp_path):
        with self.begun(tmp_path, LONG) as (_, folder):
            pass  # left running, it is killed
        self.go_on(folder, self.episodes_to_go(folder))

    def test_ctrl_c_writes_a_checkpoint_and_stops(self, tmp_path):
        changes = {**LONG, "checkpoint": {"every_episodes": 1, "keep": 3}}
        with self.begun(tmp_path, changes) as (process, folder):
            process.send_signal(signal.SIGINT)
            out, err = process.finish()
        assert process.returncode == 130
        assert "Traceback" not in out + err
        assert "--resume auto" in err
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
        assert (folder / "report.html").is_file()
        self.go_on(folder, self.episodes_to_go(folder))

    @pytest.mark.slow
    def test_the_second_ctrl_c_stops_at_once(self, tmp_path):
        slow = tmp_path / "slow.py"
        slow.write_text(
            "import time, pathlib\n"
            "def slow(rollouts):\n"
            f"    pathlib.Path({str(tmp_path / 'scoring')!r}).touch()\n"
            "    time.sleep(600)\n"
            "    return [0.0] * len(rollouts)\n"
        )
        run = write_run(tmp_path, {"rewards": [{"name": f"{slow}:slow"}]})
        process = rlhf("train", run, "--output", tmp_path / "run")

        def scoring():
            process.assert_runs()
            return (tmp_path / "scoring").exists()

        with ended(process):
            wait_until(scoring, "the first reward", every_seconds=0.02)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.assert_runs()
            process.send_signal(signal.SIGINT)
            out, err = process.finish()
        assert process.returncode == 130, err
        assert "Traceback" not in out + err
        assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"
