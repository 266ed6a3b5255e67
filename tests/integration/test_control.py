"""Live control of whole runs."""

import json
import os
import signal
import threading

import pytest
from run_files import command, lines, metrics, start, write_run
from running import ended, rlhf, wait_until

from rlhf_control.control_box import ControlBox, parse_command
from rlhf_core.errors import InterruptedRun

TRAIN = {"episodes": 4, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {"train": TRAIN, "checkpoint": {"every_episodes": None}}


class Send:
    """Leaves commands for the run, each before an update."""

    def __init__(self, commands):
        self.commands = commands

    def rlhf_run_start(self, run_folder):
        self.box = ControlBox(run_folder / "control")

    def rlhf_update_end(self, step):
        if step in self.commands:
            self.box.send(parse_command(self.commands[step].split()))


def events(folder):
    return [e for e in json.loads((folder / "manifest.json").read_text())["events"] if e["kind"] == "control"]


@pytest.mark.usefixtures("no_plots")
def test_rates_and_the_kl_coefficient_change_at_the_border(tmp_path):
    sent = {2: "set lr=5e-4", 3: "set kl_coef=0.2", 5: "set critic_lr=2e-3"}
    result = start(BASE, tmp_path / "run", hooks=[Send(sent)])
    assert [line["policy/lr"] for line in result.metrics] == pytest.approx([1e-3] * 2 + [5e-4] * 6)
    assert [line["critic/lr"] for line in result.metrics] == pytest.approx([1e-3] * 2 + [5e-4] * 3 + [2e-3] * 3)
    assert [line["kl/coef"] for line in result.metrics] == [0.05] * 4 + [0.2] * 4
    assert [(e["command"], e["step"]) for e in events(result.run_folder)] == [
        ("set optimizer.lr=0.0005", 2),
        ("set algorithm.kl_coef=0.2", 3),
        ("set optimizer.critic_lr=0.002", 5),
    ]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
def test_a_resume_keeps_what_was_set(tmp_path, caplog):
    sent = {2: "set lr=5e-4", 3: "set kl_coef=0.2", 5: "stop"}
    straight = start(BASE, tmp_path / "straight", hooks=[Send({k: v for k, v in sent.items() if v != "stop"})])
    with pytest.raises(InterruptedRun, match="stopped after episode 3 of 4"):
        start(BASE, tmp_path / "stopped", hooks=[Send(sent)])
    resumed = start(BASE, tmp_path / "stopped", resume="auto")
    assert metrics(resumed.run_folder) == metrics(straight.run_folder)
    assert "learning rate of the policy x 0.5" in caplog.text
    assert len(events(resumed.run_folder)) == 3


@pytest.mark.usefixtures("no_plots")
def test_a_checkpoint_is_written_when_asked_for(tmp_path):
    result = start(BASE, tmp_path / "run", hooks=[Send({3: "checkpoint"})])
    assert {path.name for path in (result.run_folder / "checkpoints").glob("step-*")} == {"step-4", "step-8"}


@pytest.mark.usefixtures("no_plots")
def test_what_cannot_be_set_is_refused_and_the_run_goes_on(tmp_path):
    without = {**BASE, "algorithm": {"name": "ppo", "kl_coef": 0}}
    result = start(without, tmp_path / "run", hooks=[Send({2: "set kl_coef=0.1"})])
    assert result.summary["status"] == "done"
    assert "cannot be changed during a run" in events(result.run_folder)[0]["answer"]


@pytest.mark.usefixtures("no_plots")
def test_a_paused_run_waits_and_goes_on_unchanged(tmp_path):
    straight = start(BASE, tmp_path / "straight")
    box = ControlBox(tmp_path / "run" / "control")

    def resume_once_paused():
        wait_until(lambda: list((tmp_path / "run" / "control").glob("*.answer.json")), "the pause")
        box.send(parse_command(["resume"]))

    helper = threading.Thread(target=resume_once_paused)
    helper.start()
    paused = start(BASE, tmp_path / "run", hooks=[Send({3: "pause"})])
    helper.join()
    assert metrics(paused.run_folder) == metrics(straight.run_folder)
    assert [(e["command"], e["step"]) for e in events(paused.run_folder)] == [("pause", 3), ("resume", 3)]


@pytest.mark.usefixtures("no_plots", "sighup_not_ignored")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.slow
def test_a_paused_run_hears_a_signal(tmp_path, number):
    """It goes on to the end of the episode, and a resume makes what an untouched run makes."""
    straight = start(BASE, tmp_path / "straight")
    answers = tmp_path / "run" / "control"

    def signal_once_paused():
        wait_until(lambda: list(answers.glob("*.answer.json")), "the answer to the pause")
        os.kill(os.getpid(), number)

    helper = threading.Thread(target=signal_once_paused)
    # Were the signal not heard, the run would wait for ever.
    rescue = threading.Timer(60, lambda: ControlBox(answers).send(parse_command(["resume"])))
    rescue.start()
    try:
        helper.start()
        with pytest.raises(InterruptedRun, match="stopped after episode 2 of 4"):
            start(BASE, tmp_path / "run", hooks=[Send({3: "pause"})])
    finally:
        rescue.cancel()
        helper.join()
    assert [event["command"] for event in events(tmp_path / "run")] == ["pause"]  # not rescued
    resumed = start(BASE, tmp_path / "run", resume="auto")
    assert metrics(resumed.run_folder) == metrics(straight.run_folder)


@pytest.mark.slow
def test_the_command_steers_a_run_of_two_processes(tmp_path):
    changes = {**BASE, "train": {**TRAIN, "episodes": 4000}, "strategy": {"name": "ddp"}}
    folder = tmp_path / "run"
    process = rlhf("train", write_run(tmp_path, changes), "--output", folder, "--num-processes", "2", quick_ranks=True)

    def updated():
        process.assert_runs()
        return (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size

    with ended(process):
        wait_until(updated, "an update")
        paused = command("control", folder, "pause")
        assert (paused.returncode, paused.stdout[:6]) == (0, "paused"), paused.stderr
        step = len(lines(folder / "metrics.jsonl"))
        set_lr = command("control", folder, "set", "lr=1e-5")
        assert set_lr.returncode == 0, set_lr.stderr
        assert len(lines(folder / "metrics.jsonl")) == step
        assert command("control", folder, "resume").stdout == "resumed\n"
        assert command("control", folder, "pause").returncode == 0
        process.send_signal(signal.SIGTERM)  # a paused run hears it
        _, err = process.finish()
    assert process.returncode == 130, err
    assert lines(folder / "metrics.jsonl")[-1]["policy/lr"] == pytest.approx(1e-5)
    gone = command("control", folder, "pause")
    assert gone.returncode == 2
    assert "no run is active" in gone.stderr
