"""Guards in whole runs: what is skipped, stopped and rolled back, and what the run folder says of it."""

import json
import math

import pytest
from run_files import lines, metrics, samples, start

from rlhf_core.errors import ConfigError, DivergenceError, GuardStop, RlhfError
from rlhf_core.hookspecs import Action

TRAIN = {"episodes": 6, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {"train": TRAIN, "checkpoint": {"every_episodes": 1, "keep": 4}}
pytestmark = pytest.mark.usefixtures("no_plots")


class Ask:
    """Answers once, at an update."""

    may_roll_back = True

    def __init__(self, kind, step, times=1, **options):
        self.step, self.times = step, times
        self.action = Action(kind=kind, by="mine", reason="asked for by the test", **options)

    def rlhf_decide(self, moment):
        if moment.at == "update" and moment.step == self.step and self.times:
            self.times -= 1
            return self.action
        return None


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_driven_into_kl_blow_up_is_rolled_back_and_finishes(tmp_path):
    blown = {**BASE, "optimizer": {"lr": 0.05, "max_grad_norm": None}}
    free = start(blown, tmp_path / "free")
    assert max(line["kl/mean"] for line in free.metrics) > 1.0
    guarded = {
        **blown,
        "guards": {"kl": {"action": "rollback", "bound": 0.5}, "rollback": {"lr_factor": 0.05, "max_times": 3}},
    }
    result = start(guarded, tmp_path / "guarded")
    assert result.summary["status"] == "done"
    assert result.summary["rollbacks"] >= 1
    assert max(line["kl/mean"] for line in result.metrics) <= 0.5
    assert [line["step"] for line in result.metrics] == list(range(1, 13))
    assert [line["sample_id"] for line in samples(result.run_folder)] == list(range(48))
    first = manifest(result.run_folder)["events"][0]
    assert (first["kind"], first["guard"], first["lr_factors"]["policy"]) == ("rollback", "kl", 0.05)
    assert result.metrics[-1]["policy/lr"] == pytest.approx(0.05 * 0.05 ** result.summary["rollbacks"])
    assert "Rollback 1: back to update" in (result.run_folder / "run.log").read_text()


@pytest.mark.slow
def test_a_rollback_without_a_smaller_rate_repeats_the_run_exactly(tmp_path):
    straight = start(BASE, tmp_path / "straight")
    for step in (1, 2, 7):  # to the checkpoint before the first update, and to a later one
        rolled = start(BASE, tmp_path / f"rolled-{step}", hooks=[Ask("rollback", step, lr_factor=1.0)])
        assert metrics(rolled.run_folder) == metrics(straight.run_folder)
        assert samples(rolled.run_folder) == samples(straight.run_folder)
        assert rolled.summary["rollbacks"] == 1


@pytest.mark.slow
def test_a_resume_after_a_rollback_keeps_the_smaller_rate(tmp_path):
    whole = start(BASE, tmp_path / "whole", hooks=[Ask("rollback", 5)])
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(BASE, tmp_path / "stopped", hooks=[Ask("rollback", 5), StopAfter(4)])
    assert summary(tmp_path / "stopped")["status"] == "rolled-back-and-failed"
    resumed = start(BASE, tmp_path / "stopped", resume="auto")
    assert metrics(resumed.run_folder) == metrics(whole.run_folder)
    assert resumed.metrics[-1]["policy/lr"] == pytest.approx(0.5e-3)
    assert resumed.summary["rollbacks"] == 1


class StopAfter:
    def __init__(self, episode):
        self.episode = episode

    def rlhf_episode_end(self, episode):
        if episode == self.episode:
            raise RlhfError("stopped by the test")


def test_rollbacks_are_bounded(tmp_path):
    with pytest.raises(GuardStop, match="it was rolled back 2 times"):
        start(BASE, tmp_path / "run", hooks=[Ask("rollback", 3, times=9, max_times=2)])
    assert summary(tmp_path / "run")["status"] == "rolled-back-and-failed"
    assert summary(tmp_path / "run")["rollbacks"] == 2


def test_a_stop_ends_the_run_with_the_line_that_led_to_it(tmp_path):
    with pytest.raises(GuardStop, match=r"guard kl: kl/mean is .*, above 1e-06"):
        start({**BASE, "guards": {"kl": {"bound": 1e-6}}}, tmp_path / "run")
    assert summary(tmp_path / "run")["status"] == "failed"
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["kl/mean"] > 1e-6


def test_a_skip_leaves_out_the_rest_of_the_episode(tmp_path):
    result = start(BASE, tmp_path / "run", hooks=[Ask("skip", 3)])
    assert [line["episode"] for line in result.metrics] == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [line["step"] for line in result.metrics] == list(range(1, 12))
    assert result.summary["status"] == "done"


@pytest.fixture
def poisoned(monkeypatch):
    """A run whose third batch has a loss that is not a number."""
    from rlhf_core.training.updater import _Meter

    calls = iter(range(1000))
    finite = _Meter.first_not_finite
    monkeypatch.setattr(_Meter, "first_not_finite", lambda self: "loss/policy" if next(calls) == 2 else finite(self))


@pytest.mark.usefixtures("poisoned")
def test_an_update_that_is_not_finite_stops_the_run_by_default(tmp_path):
    with pytest.raises(DivergenceError, match="loss/policy is not a finite number"):
        start(BASE, tmp_path / "run")
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.usefixtures("poisoned")
def test_an_update_that_is_not_finite_can_be_skipped(tmp_path):
    result = start({**BASE, "guards": {"non_finite": {"action": "skip"}}}, tmp_path / "run")
    assert [line["episode"] for line in result.metrics] == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert all(math.isfinite(line["loss/policy"]) for line in result.metrics)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.slow
def test_an_update_that_is_not_finite_can_be_rolled_back(tmp_path):
    result = start({**BASE, "guards": {"non_finite": {"action": "rollback"}}}, tmp_path / "run")
    assert [line["step"] for line in result.metrics] == list(range(1, 13))
    assert manifest(result.run_folder)["events"][0]["from_step"] == 3


def test_a_rollback_needs_two_checkpoints(tmp_path):
    rollback = {"kl": {"action": "rollback", "bound": 1}}
    with pytest.raises(ConfigError, match=r"set checkpoint\.keep to 2 or more"):
        start({**BASE, "checkpoint": {"keep": 1}, "guards": rollback}, tmp_path / "run")
