"""The contract of a reward: one finite number for every answer, whatever its text and metadata."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import ClassVar

import pytest
from pydantic import BaseModel

from rlhf_core.components import RewardContext
from rlhf_core.config.sections import RewardCallOptions
from rlhf_core.place import resolve_device
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.rewards.scorer import RewardScorer, make_reward_spec
from rlhf_core.types import Rollout

from ..models import POLICY_PATH
from ..rollouts import awkward_rollouts
from .base import ComponentContract

_ABSOLUTE = 1e-4
"""Neural rewards round differently in another batch."""


class RewardContract(ComponentContract):
    """Override `rollouts` where the reward needs answers or metadata of a certain form."""

    kind = "rewards"
    deterministic: ClassVar[bool] = True
    """Whether the same answer always gets the same score; set False for a sampled judge."""
    looks_at_batch: ClassVar[bool] = False
    """Whether a score may depend on the other answers of the call; set True for a reward that ranks them."""
    timeout_seconds: ClassVar[float] = 60.0

    @pytest.fixture(scope="class")
    @classmethod
    def rollouts(cls) -> Sequence[Rollout]:
        """The answers that are scored; at least two."""
        return awkward_rollouts()

    @pytest.fixture(scope="class")
    @classmethod
    def scorer(cls, selected: SelectedPlugin, config: BaseModel, rlhf_device: str) -> Iterator[RewardScorer]:
        """The reward under core's policy, as a run calls it."""
        with closing(cls._scorer(selected, config, rlhf_device, isolate=False)) as scorer:
            yield scorer

    @classmethod
    def _scorer(cls, selected: SelectedPlugin, config: BaseModel, device: str, *, isolate: bool) -> RewardScorer:
        policy = RewardCallOptions(timeout_seconds=cls.timeout_seconds, isolate=isolate)
        context = RewardContext(str(resolve_device(device)), 0, POLICY_PATH)
        return RewardScorer([make_reward_spec(selected, config, context, policy, name="it")])

    def test_one_finite_number_for_every_answer(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        """Core refuses a wrong count, NaN, infinity and values that are not numbers, and names the sample."""
        assert len(_scores(scorer, rollouts)) == len(rollouts)

    def test_each_answer_alone(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        """`batch_size` is the user's choice: a call may bring a single answer, and usually brings others."""
        alone = [_scores(scorer, [rollout])[0] for rollout in rollouts]
        if self.deterministic and not self.looks_at_batch:
            _same(alone, _scores(scorer, rollouts), "one by one", "in one call; say looks_at_batch = True if so meant")

    def test_the_order_of_answers_is_kept(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        backwards = _scores(scorer, list(reversed(rollouts)))
        assert len(backwards) == len(rollouts)
        if self.deterministic:
            _same(backwards[::-1], _scores(scorer, rollouts), "in reverse order", "in order")

    def test_the_same_answer_gets_the_same_score(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        """A prompt that has to be made again is scored again."""
        again = _scores(scorer, rollouts)
        if self.deterministic:
            _same(again, _scores(scorer, rollouts), "at first", "again; say deterministic = False if so meant")

    def test_rollouts_are_left_as_they_are(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        """Several rewards see the same rollouts, and the samples file is written from them."""
        seen = copy.deepcopy(list(rollouts))
        scorer.score(seen)
        assert seen == list(rollouts), "the reward changes the rollouts (their metadata?); copy what you change"

    def test_scores_in_a_process_of_its_own(
        self,
        selected: SelectedPlugin,
        config: BaseModel,
        rlhf_device: str,
        scorer: RewardScorer,
        rollouts: Sequence[Rollout],
    ) -> None:
        """`isolate: true` rebuilds the reward in another process from its name and options alone."""
        with closing(self._scorer(selected, config, rlhf_device, isolate=True)) as isolated:
            scores = _scores(isolated, rollouts)
        assert len(scores) == len(rollouts)
        if self.deterministic:
            _same(scores, _scores(scorer, rollouts), "in a process of its own", "in this one")


def _scores(scorer: RewardScorer, rollouts: Sequence[Rollout]) -> list[float]:
    rows = scorer.score(copy.deepcopy(list(rollouts)))  # a reward that modifies its input must not hide it
    assert all(row is not None for row in rows), "an answer got no score"
    return [row["it"] for row in rows if row is not None]


def _same(one: Sequence[float], other: Sequence[float], when: str, otherwise: str) -> None:
    different = [
        f"answer {index}: {a!r} {when}, {b!r} {otherwise}"
        for index, (a, b) in enumerate(zip(one, other, strict=True))
        if abs(a - b) > _ABSOLUTE * max(1.0, abs(a), abs(b))
    ]
    assert not different, "scores differ: " + "; ".join(different[:4])
