"""`train(rewards=[function])`: rewards of a notebook, which are in no file."""

from __future__ import annotations

import pytest
from run_files import samples, start, write_run

from rlhf_core import train
from rlhf_core.errors import ConfigError, UserInputError
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")


def brevity(rollouts, *, target: int = 4):
    """1 for a short answer."""
    return [float(len(rollout.completion) <= target) for rollout in rollouts]


def no_reward(rollouts, more):
    return []


def test_a_function_is_a_reward(tmp_path):
    """It takes the place of the default, and can be given again to a resume."""
    run = {key: value for key, value in tiny_run({"train": {"episodes": 1}}).items() if key != "rewards"}
    result = train(run, output=tmp_path / "run", rewards=[brevity])
    assert result.metrics[0].keys() >= {"reward/brevity"} and "reward/exact-match" not in result.metrics[0]
    longer = {**run, "train": {**run["train"], "episodes": 2}}
    again = train(longer, output=tmp_path / "run", rewards=[brevity], resume="auto")
    assert again.metrics[-1]["episode"] == 1
    with pytest.raises(ConfigError, match=r"again, or name it in its file: FILE\.py:brevity"):
        train(tmp_path / "run" / "config.yaml", dry_run=True)
    assert {tuple(line["rewards"]) for line in samples(tmp_path / "run")} == {("brevity",)}


def test_it_is_added_to_the_rewards_of_the_run(tmp_path):
    result = train(write_run(tmp_path, {"train": {"episodes": 1}}), output=tmp_path / "run", rewards=[brevity])
    assert result.metrics[0].keys() >= {"reward/brevity", "reward/exact-match"}


def test_what_it_cannot_do_is_refused(tmp_path):
    with pytest.raises(UserInputError, match=r"brevity cannot be sent to another process\n.*FILE\.py:FUNCTION"):
        train(tiny_run(), output=tmp_path / "run", rewards=[brevity], num_processes=2)
    with pytest.raises(ConfigError, match="no_reward"):
        train(tiny_run(), output=tmp_path / "run", rewards=[no_reward])
    with pytest.raises(ConfigError, match="a second reward"):
        train(tiny_run(), output=tmp_path / "run", rewards=[brevity, brevity])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rewards", [[brevity], [{"name": brevity}]])
def test_a_function_in_the_mapping_says_what_to_do(tmp_path, rewards):
    with pytest.raises(ConfigError, match="a run file cannot contain a function") as caught:
        start({"rewards": rewards}, tmp_path / "run")
    assert "FILE.py:brevity, or, for a reward: train(run, rewards=[brevity])" in caught.value.hint
