"""Rollouts and scorers for tests of rewards."""

import sys
from pathlib import Path

import pytest

from rlhf_core.config.sections import RewardCallOptions
from rlhf_core.rewards.scorer import RewardScorer, RewardSpec

# `faulty_rewards` must be importable by name, here and in the processes of isolated rewards.
sys.path.append(str(Path(__file__).parent))

from faulty_rewards import make_rollout


@pytest.fixture
def rollouts():
    return [make_rollout(index) for index in range(4)]


@pytest.fixture
def score(tmp_path):
    """`score(rewards, rollouts, **policy)`: the scores, and the scorer that gave them; all are closed at the end."""
    scorers = []

    def run(rewards, rollouts, *, recipe=None, plugin="dist 1.0", **policy):
        rewards = rewards if isinstance(rewards, dict) else {"r": rewards}
        specs = [
            RewardSpec(
                name=name, function=function, recipe=recipe, plugin=plugin, call_options=RewardCallOptions(**policy)
            )
            for name, function in rewards.items()
        ]
        scorer = RewardScorer(specs, cache_folder=tmp_path)
        scorers.append(scorer)
        return scorer.score(rollouts), scorer

    yield run
    for scorer in scorers:
        scorer.close()
