"""Runs with an environment: equal wherever they run, resumed exactly, and whole after a maker was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from environment_runs import RUNS, make_runs, run_file
from run_files import metrics, samples
from running import Forked, ranks, run_all

from rlhf_core import train
from rlhf_core.errors import RlhfError

EXACT = 1e-5


@pytest.fixture(scope="module")
def local_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In one process, and in two as a launcher starts them."""
    out, names = tmp_path_factory.mktemp("runs"), list(RUNS)
    run_all(
        Forked(make_runs, out, "single", names), *(Forked(make_runs, out, "ddp", names, env=each) for each in ranks(2))
    )
    return out


@pytest.fixture(scope="module")
def ray_runs(local_runs: Path, ray_worker_source: None) -> Path:
    """The same on Ray with two makers, and one more in which a maker is killed."""
    run_all(Forked(make_runs, local_runs, "ray", env={**os.environ, "OMP_NUM_THREADS": "1"}))
    return local_runs


def assert_equal(one: Path, other: Path) -> None:
    ours, theirs = metrics(one), metrics(other)
    assert len(ours) == len(theirs) == 6
    for mine, yours in zip(ours, theirs, strict=True):
        assert set(mine) >= set(yours)  # Ray tells more, of its own
        for key, value in yours.items():
            if key != "rollout/logprob_gap_max":
                assert mine[key] == pytest.approx(value, rel=EXACT, abs=EXACT), (mine["step"], key)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one(local_runs: Path, name: str) -> None:
    assert_equal(local_runs / f"{name}-ddp", local_runs / f"{name}-single")
    assert_same_samples(local_runs / f"{name}-ddp", local_runs / f"{name}-single")


@pytest.mark.slow
def test_a_process_for_the_environment_changes_nothing(local_runs: Path) -> None:
    assert metrics(local_runs / "isolated-single") == metrics(local_runs / "grpo-branches-single")
    assert samples(local_runs / "isolated-single") == samples(local_runs / "grpo-branches-single")


@pytest.mark.slow
def test_nor_does_one_for_each_maker_on_ray(ray_runs: Path) -> None:
    assert_equal(ray_runs / "isolated-ray", ray_runs / "grpo-branches-single")
    assert_same_samples(ray_runs / "isolated-ray", ray_runs / "grpo-branches-single")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_makers_on_ray_train_as_one_process(ray_runs: Path, name: str) -> None:
    assert_equal(ray_runs / f"{name}-ray", ray_runs / f"{name}-single")
    assert_same_samples(ray_runs / f"{name}-ray", ray_runs / f"{name}-single")


@pytest.mark.slow
def test_a_maker_killed_in_the_middle_of_an_episode_loses_and_doubles_nothing(ray_runs: Path) -> None:
    assert not (ray_runs / "dies").exists()
    assert "is restarted" in (ray_runs / "killed-ray" / "run.log").read_text()
    assert_same_samples(ray_runs / "killed-ray", ray_runs / "ppo-single")
    assert_equal(ray_runs / "killed-ray", ray_runs / "ppo-single")


def assert_same_samples(one: Path, other: Path) -> None:
    def told(folder: Path) -> list[object]:
        keys = ("sample_id", "branch", "completion", "prompt", "finish_reason")
        return sorted(tuple(line[key] for key in keys) for line in samples(folder))

    assert told(one) == told(other)
    assert len({(line["sample_id"], line["branch"]) for line in samples(one)}) == len(samples(one))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_trainer_computes_the_log_probs_the_engine_sampled_with(local_runs: Path, name: str) -> None:
    for deployment in ("single", "ddp"):
        found = [line["rollout/logprob_gap_max"] for line in metrics(local_runs / f"{name}-{deployment}")]
        assert found
        assert max(found) < 1e-4


@pytest.mark.slow
def test_what_is_measured(local_runs: Path) -> None:
    first = metrics(local_runs / "grpo-branches-single")[0]
    assert 1 < first["environment/branches"] < 2
    assert 3 < first["environment/num_turns_mean"] < 5
    assert 0 < first["response/observation_fraction"] < 1
    assert first["reward/environment"] == first["reward/mean"]
    assert first["environment/failed_fraction"] == first["environment/truncated_fraction"] == 0.0
    lines = samples(local_runs / "grpo-branches-single")
    assert {line["sample_id"] for line in lines} == set(range(30))
    assert {line["branch"] for line in lines} >= {0, 1, 2}
    assert [turn["role"] for turn in lines[0]["turns"]] == ["policy"]


class StopAfterFirst:
    """Fails the run once its first episode is over and its checkpoint written."""

    def rlhf_episode_end(self, episode: int) -> None:
        if episode == 0:
            raise RlhfError("stopped by the test")


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["several", "guess-number", "ppo", "grpo-branches"])
def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path: Path, name: str) -> None:
    game = {"environment": {"name": "guess-number", "max_turns": 4}} if name == "guess-number" else {}
    saved = {"checkpoint": {"every_episodes": 1}, "eval": {"every_episodes": 2, "num_prompts": 4}}
    run = run_file("ppo" if game else name, **saved, **game)
    straight = train(run, output=tmp_path / "straight")
    with pytest.raises(RlhfError, match="stopped by the test"):
        train(run, output=tmp_path / "stopped", hooks=[StopAfterFirst()])
    resumed = train(run, output=tmp_path / "stopped", resume="auto")
    assert straight is not None
    assert resumed is not None
    assert metrics(resumed.run_folder) == metrics(straight.run_folder)
    assert samples(resumed.run_folder) == samples(straight.run_folder)
    assert straight.summary["eval_after"] == resumed.summary["eval_after"] is not None
    weights = [(each.run_folder / "model/model.safetensors").read_bytes() for each in (straight, resumed)]
    assert weights[0] == weights[1]
