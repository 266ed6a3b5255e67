"""The last line of an episode."""

import pytest
import torch

from rlhf_core.config.sections import LoggingConfig
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.rollout import collected_episode
from rlhf_core.runfolder.folder import RunFolder
from rlhf_core.training.estimates import EstimatedEpisode
from rlhf_core.training.record import EpisodeRecord
from rlhf_core.types import PhaseTimes

NOTHING = EstimatedEpisode(epochs=[], scores=[], items=[], rollouts=[])


class TwoRanks:
    """A strategy whose other rank did the same."""

    device = torch.device("cpu")

    def all_reduce(self, tensor, op="sum"):
        return tensor * 2 if op == "sum" else tensor

    def all_gather_objects(self, value):
        return [value, value]


@pytest.fixture
def record(tmp_path):
    with RunFolder.take(tmp_path / "run") as folder:
        hooks = HookRelay()
        with EpisodeRecord.open(folder, hooks, step=0, episode=-1, logging=LoggingConfig()) as record:
            yield record


def test_what_rewards_cost_stands_on_the_last_line_summed_over_ranks_and_starts_anew(record):
    calls = {"reward_calls/r/calls": 2.0, "reward_calls/r/seconds": 0.5, "reward_calls/r/failures": 1.0}
    record.rollouts(0, collected_episode([], PhaseTimes(reward_calls=calls)), NOTHING)
    record.start_episode(0, 0, {})
    record.update({"loss/policy": 1.0})
    first = record.end_episode(TwoRanks())
    assert {key: value for key, value in first.items() if key.startswith("reward_calls/")} == {
        "reward_calls/r/calls": 4.0,
        "reward_calls/r/seconds": 1.0,
        "reward_calls/r/failures": 2.0,
    }
    record.rollouts(1, collected_episode([], PhaseTimes()), NOTHING)
    record.start_episode(1, 1, {})
    record.update({"loss/policy": 1.0})
    assert not [key for key in record.end_episode(TwoRanks()) if key.startswith("reward_calls/")]


def test_times_of_two_makers_add_up():
    times = PhaseTimes(reward_s=1.0, reward_calls={"reward_calls/a/calls": 1.0})
    times.add(PhaseTimes(reward_s=2.0, reward_calls={"reward_calls/a/calls": 2.0, "reward_calls/b/calls": 5.0}))
    assert times == PhaseTimes(reward_s=3.0, reward_calls={"reward_calls/a/calls": 3.0, "reward_calls/b/calls": 5.0})


def test_how_much_of_the_prompts_was_there_is_told_over_all_ranks(record):
    for episode, times in enumerate((PhaseTimes(prompt_tokens=8, reused_tokens=6), PhaseTimes())):
        record.rollouts(episode, collected_episode([], times), NOTHING)
        record.start_episode(episode, episode, {})
        record.update({"loss/policy": 1.0})
        told = record.end_episode(TwoRanks()).get("memory/prompt_reused_fraction")
        assert told == (0.75 if episode == 0 else None)
