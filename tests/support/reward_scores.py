"""Fixtures for tests of rewards: rollouts, and scorers that are closed at the end."""

import pytest
from faulty_rewards import make_rollout

from rlhf_core.config.sections import RewardCallOptions
from rlhf_core.rewards.calling import RewardSpec
from rlhf_core.rewards.scorer import RewardScorer


@pytest.fixture
def rollouts():
    return [make_rollout(index) for index in range(4)]


@pytest.fixture
def score():
    """`score(rewards, rollouts, **options)` returns the scores and their scorer."""
    scorers = []

    def run(rewards, rollouts, *, recipe=None, plugin="dist 1.0", **options):
        rewards = rewards if isinstance(rewards, dict) else {"r": rewards}
        specs = [
            RewardSpec(
                name=name, function=function, recipe=recipe, plugin=plugin, call_options=RewardCallOptions(**options)
            )
            for name, function in rewards.items()
        ]
        scorer = RewardScorer(specs)
        scorers.append(scorer)
        return scorer.score(rollouts), scorer

    yield run
    for scorer in scorers:
        scorer.close()
