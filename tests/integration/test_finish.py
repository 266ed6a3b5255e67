"""Runs that a hook or a guard ends as done: the model is there, and a resume goes no further."""

import importlib
import json
import runpy
import subprocess
import sys

import pytest
from run_files import command, lines, metrics, samples, start, write_run
from running import run_to_end

from rlhf_cli.main import run
from rlhf_core.errors import ConfigError, GuardStop
from rlhf_core.hookspecs import Action

train_module = importlib.import_module("rlhf_core.entry.train")  # `rlhf_core.entry.train` is also a function
TRAIN = {"episodes": 5, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {"train": TRAIN, "checkpoint": {"every_episodes": None}}
AT_ONCE = {"early-stop": {"metric": "reward/mean", "below": 2.0, "patience": 2}}
pytestmark = pytest.mark.usefixtures("no_plots")


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_early_stop_ends_a_run_as_done_with_its_model(tmp_path):
    result = start({**BASE, "hooks": AT_ONCE, "eval": {"every_episodes": None, "num_prompts": 4}}, tmp_path / "run")
    assert result.summary["status"] == "done"
    assert result.summary["finished"]["guard"] == "early-stop"
    assert result.summary["finished"]["reason"].startswith("reward/mean is 0, below 2 for 2 episodes")
    assert [line["episode"] for line in result.metrics] == [0, 0, 1, 1]
    assert result.metrics[-1]["eval/score"] == result.summary["eval_after"]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-4").is_dir()


def test_a_resume_of_it_has_nothing_to_do(tmp_path, capsys, own_logger):
    file = write_run(tmp_path, {**BASE, "hooks": AT_ONCE})
    assert run(["train", str(file), "--output", str(tmp_path / "run")]) == 0
    assert "finished    early-stop: reward/mean is" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.jsonl")}
    assert run(["train", "--output", str(tmp_path / "run"), "--resume", "auto"]) == 0
    said = capsys.readouterr()
    assert "already done: early-stop: reward/mean is" in said.err
    assert "To continue, change hooks.early-stop (metric, above, below, patience)" in said.err
    assert "error" not in said.err
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.jsonl")} == before


@pytest.mark.slow
def test_a_resume_with_another_bound_goes_on(tmp_path):
    straight = start(BASE, tmp_path / "straight")
    start({**BASE, "hooks": AT_ONCE}, tmp_path / "run")
    other = {"early-stop": {"metric": "reward/mean", "above": 2.0}}
    resumed = start({**BASE, "hooks": other}, tmp_path / "run", resume="auto")
    assert metrics(resumed.run_folder) == metrics(straight.run_folder)
    assert "finished" not in resumed.summary


def test_a_resume_makes_the_model_that_was_not_written(tmp_path):
    """Killed after the checkpoint, before the end."""
    done = start({**BASE, "hooks": AT_ONCE}, tmp_path / "run")
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    told = {**summary(tmp_path / "run"), "status": "running"}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(told))
    again = start({**BASE, "hooks": AT_ONCE}, tmp_path / "run", resume="auto")
    assert (again.summary["status"], len(again.metrics)) == ("done", len(done.metrics))
    assert again.summary["finished"]["guard"] == "early-stop"
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


class Finish:
    def rlhf_decide(self, moment):
        return Action(kind="finish", by="mine", reason="enough") if moment.step == 3 else None


def test_a_finish_after_an_update_ends_the_episode(tmp_path):
    result = start(BASE, tmp_path / "run", hooks=[Finish()])
    assert [line["episode"] for line in result.metrics] == [0, 0, 1]
    assert result.summary["finished"] == {"guard": "mine", "reason": "enough"}
    assert len(samples(result.run_folder)) == 16


def test_a_guard_may_finish(tmp_path):
    guards = {"plateau": {"action": "finish", "episodes": 1, "min_improvement": 9.0}}
    result = start({**BASE, "guards": guards}, tmp_path / "run")
    assert (result.summary["status"], result.summary["finished"]["guard"]) == ("done", "plateau")


def test_a_stop_names_the_guard_and_its_keys(tmp_path):
    with pytest.raises(GuardStop, match=r"set by guards\.kl \(action, bound\): lower optimizer\.lr"):
        start({**BASE, "guards": {"kl": {"bound": 1e-9}}}, tmp_path / "run")
    lines(tmp_path / "run" / "metrics.jsonl")


HOOK = '''
from rlhf_core.hookspecs import Action

class Counter:
    """Counts episodes over all sessions of a run."""

    def __init__(self, *, stop_at: int = 3, action: str = "finish"):
        self.stop_at, self.action, self.seen = stop_at, action, 0

    def rlhf_decide(self, moment):
        self.seen += moment.at == "episode"
        if moment.at == "episode" and self.seen >= self.stop_at:
            return Action(kind=self.action, by="Counter", reason=f"{self.seen} episodes")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
'''


def test_a_hook_of_a_file_keeps_its_count_over_a_resume(tmp_path):
    file = tmp_path / "counter.py"
    file.write_text(HOOK)
    name = f"{file}:Counter"
    short = {**BASE, "train": {**TRAIN, "episodes": 2}, "hooks": {name: {"stop_at": 3}}}
    first = start(short, tmp_path / "run")
    assert "finished" not in first.summary
    longer = {**BASE, "hooks": {name: {"stop_at": 3}}}
    result = start(longer, tmp_path / "run", resume="auto")
    assert result.summary["finished"] == {"guard": "Counter", "reason": "3 episodes"}
    assert result.metrics[-1]["episode"] == 2


TWO_SIGNALS = """
import os, signal

class Late:
    def rlhf_run_end(self, summary):
        for _ in range(2 if summary["status"] == "done" else 0):
            os.kill(os.getpid(), signal.SIGINT)
"""


def test_two_signals_after_the_end_leave_the_run_done(tmp_path, own_logger):
    """Its exit code, too: a job's script that reads it must not take a finished run for an interrupted one."""
    hook = tmp_path / "late.py"
    hook.write_text(TWO_SIGNALS)
    file = write_run(tmp_path, {**BASE, "train": {**TRAIN, "episodes": 2}, "hooks": {f"{hook}:Late": {}}})
    assert run(["train", str(file), "--output", str(tmp_path / "run"), "--quiet"]) == 0
    assert summary(tmp_path / "run")["status"] == "done"
    assert (tmp_path / "run/model").is_dir()


LATE_SIGNAL = """
import atexit, os, signal, sys
from contextlib import contextmanager
from rlhf_cli.main import main
from rlhf_core.entry import train

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

@contextmanager
def leaving(*given, take=train.RunLedger.take):
    with take(*given) as ledger:
        yield ledger
        print("late")
        interrupt()

class Output:
    def flush(self):
        caller = sys._getframe().f_back
        if caller is not None and caller.f_code.co_filename == main.__code__.co_filename:
            print("late", file=sys.__stdout__)
            interrupt()
    def __getattr__(self, name):
        return getattr(sys.__stdout__, name)

if sys.argv[1] == "leaving the folder":
    train.RunLedger.take = leaving
if sys.argv[1] == "printing":
    sys.stdout = Output()
if sys.argv[1] == "exiting":
    atexit.register(lambda: (print("late"), interrupt()))
main(sys.argv[2:])
"""


def run_script(*arguments):
    """Run a script with its arguments, in a process that ends with it."""
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.parametrize("when", ["leaving the folder", "printing", "exiting"])
@pytest.mark.slow
def test_a_signal_after_the_run_has_ended_changes_no_exit_code(tmp_path, when):
    script = tmp_path / "late.py"
    script.write_text(LATE_SIGNAL)
    file = write_run(tmp_path, {**BASE, "train": {**TRAIN, "episodes": 1}, "hooks": {"disable": ["report"]}})
    arguments = ["train", file, "--output", tmp_path / "run", "--quiet"]
    if when == "exiting":  # a forked process does not run what `atexit` has
        done = subprocess.run([sys.executable, script, when, *arguments], capture_output=True, text=True, timeout=120)
    else:
        done = run_to_end(run_script, str(script), when, *map(str, arguments))
    assert "late" in done.stdout
    assert (done.returncode, "interrupted" in done.stderr) == (0, False), done.stderr
    assert summary(tmp_path / "run")["status"] == "done"


def test_a_signal_before_a_resume_of_a_done_run_begins_is_an_interrupt(tmp_path, own_logger, monkeypatch):
    file = write_run(tmp_path, {**BASE, "train": {**TRAIN, "episodes": 1}})
    assert run(["train", str(file), "--output", str(tmp_path / "run"), "--quiet"]) == 0

    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "plan_resume", interrupted)
    assert run(["train", "--output", str(tmp_path / "run"), "--resume", "auto", "--set", "train.episodes=2"]) == 130
    assert summary(tmp_path / "run")["status"] == "done"


def test_its_options_are_checked_and_written_down(tmp_path):
    file = tmp_path / "counter.py"
    file.write_text(HOOK)
    with pytest.raises(ConfigError, match=r'unknown key; did you mean "stop_at"'):
        start({**BASE, "hooks": {f"{file}:Counter": {"stopat": 3}}}, tmp_path / "run")
    with pytest.raises(ConfigError, match=r'not define a class "Contour"; did you mean "Counter"'):
        start({**BASE, "hooks": {f"{file}:Contour": {}}}, tmp_path / "run")


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ({"early-stop": {"metric": "reward/mean"}}, "needs one of `above` and `below`"),
        ({"early-stop": {"metrc": "x", "above": 1}}, r'hooks\.early-stop\.metrc: unknown key; did you mean "metric"'),
        ({"early-stp": {"above": 1}}, r'hooks\.early-stp: no hook plugin "early-stp" is installed; did you mean'),
        ({"disabel": ["x"]}, r'hooks\.disabel: .*did you mean "disable"'),
        ({"early-stop": 3}, "should be a mapping of options"),
    ],
)
def test_wrong_hooks_are_said_where_they_stand(tmp_path, hooks, says):
    with pytest.raises(ConfigError, match=says):
        start({**BASE, "hooks": hooks}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_listed_hook_may_be_disabled(tmp_path):
    result = start({**BASE, "hooks": {**AT_ONCE, "disable": ["early_stop"]}}, tmp_path / "run")
    assert "finished" not in result.summary
    assert len(result.metrics) == 10


@pytest.mark.slow
def test_all_processes_finish_together(tmp_path):
    changes = {**BASE, "hooks": AT_ONCE, "strategy": {"name": "ddp"}, "train": {**TRAIN, "episodes": 50}}
    file = write_run(tmp_path, changes)
    done = command("train", file, "--output", tmp_path / "run", "--num-processes", "2", quick_ranks=True)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert summary(tmp_path / "run")["finished"]["guard"] == "early-stop"
    assert [line["episode"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 0, 1, 1]
    again = command("train", "--output", tmp_path / "run", "--resume", "auto")
    assert (again.returncode, "already done" in again.stderr) == (0, True), again.stderr


@pytest.mark.slow
def test_the_quickstart_ends_at_its_goal_and_a_resume_goes_no_further(tmp_path):
    goal = ["--set", "hooks.early-stop.metric=reward/mean", "--set", "hooks.early-stop.above=0.5"]
    done = command("train", "--output", tmp_path / "run", *goal)
    assert done.returncode == 0, done.stderr
    told = summary(tmp_path / "run")
    assert (told["status"], told["finished"]["guard"]) == ("done", "early-stop")
    written = lines(tmp_path / "run" / "metrics.jsonl")
    assert written[-1]["reward/mean"] > 0.5
    assert all(line["reward/mean"] <= 0.5 for line in written if line["episode"] < written[-1]["episode"])
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    again = command("train", "--output", tmp_path / "run", "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert "already done: early-stop: reward/mean is" in again.stderr
    assert lines(tmp_path / "run" / "metrics.jsonl") == written


def test_a_hook_of_a_file_is_run_under_the_rules_of_rewards(tmp_path, capsys, own_logger):
    (tmp_path / "runs").mkdir()
    (tmp_path / "counter.py").write_text(HOOK)
    name = f"{tmp_path / 'counter.py'}:Counter"
    file = write_run(tmp_path / "runs", {**BASE, "hooks": {name: {"stop_at": 1}}})
    out = ["--output", str(tmp_path / "run")]
    assert run(["train", str(file), *out]) == 2
    assert "its code is not executed" in capsys.readouterr().err
    assert run(["config", "check", str(file)]) == 0
    assert run(["train", str(file), *out, "--trust"]) == 0
    assert run(["train", *out, "--resume", "auto", "--set", "train.seed=1"]) == 0  # as the run was allowed to
    assert "already done: Counter: 1 episodes" in capsys.readouterr().err
