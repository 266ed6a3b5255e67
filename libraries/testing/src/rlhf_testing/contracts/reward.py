"""Contract of a reward: one finite number for every answer, whatever its text and metadata."""

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

_TOLERANCE = 1e-4
"""Tolerance, since neural rewards round differently in another batch."""


class RewardContract(ComponentContract):
    """Tests of a reward. Override `rollouts` if the reward needs answers or metadata of a certain form.

    Example:
        class TestBrevity(RewardContract):
            plugin = "brevity"
            options = {"target_tokens": 8}
    """

    kind = "rewards"
    deterministic: ClassVar[bool] = True
    """Whether the same answer always gets the same score. Set it to False for a sampled judge."""
    looks_at_batch: ClassVar[bool] = False
    """Whether a score may depend on the other answers of the call. Set it to True for a reward that ranks them."""
    timeout_seconds: ClassVar[float] = 60.0

    @pytest.fixture(scope="class")
    @classmethod
    def rollouts(cls) -> Sequence[Rollout]:
        """The answers to score, at least two."""
        return awkward_rollouts()

    @pytest.fixture(scope="class")
    @classmethod
    def scorer(cls, selected: SelectedPlugin, config: BaseModel, rlhf_device: str) -> Iterator[RewardScorer]:
        """The reward with core's call options, as a run calls it."""
        with closing(cls._scorer(selected, config, rlhf_device, isolate=False)) as scorer:
            yield scorer

    @classmethod
    def _scorer(cls, selected: SelectedPlugin, config: BaseModel, device: str, *, isolate: bool) -> RewardScorer:
        options = RewardCallOptions(timeout_seconds=cls.timeout_seconds, isolate=isolate)
        context = RewardContext(str(resolve_device(device)), 0, POLICY_PATH)
        return RewardScorer([make_reward_spec(selected, config, context, options, name="it")])

    def test_one_finite_number_for_every_answer(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        """Core rejects a wrong number of scores, NaN, infinity and other values, and names the sample."""
        assert len(_scores(scorer, rollouts)) == len(rollouts)

    def test_each_answer_alone(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        """Users choose `batch_size`: a call may contain one answer or several."""
        alone = [_scores(scorer, [rollout])[0] for rollout in rollouts]
        if self.deterministic and not self.looks_at_batch:
            _check_same(alone, _scores(scorer, rollouts), "alone", "in one call (intended? set looks_at_batch = True)")

    def test_the_order_of_answers_is_kept(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        backwards = _scores(scorer, list(reversed(rollouts)))
        assert len(backwards) == len(rollouts)
        if self.deterministic:
            _check_same(backwards[::-1], _scores(scorer, rollouts), "in reverse order", "in order")

    def test_the_same_answer_gets_the_same_score(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        """Answers to a prompt that is sampled again are scored again."""
        again = _scores(scorer, rollouts)
        if self.deterministic:
            _check_same(again, _scores(scorer, rollouts), "first", "again (intended? set deterministic = False)")

    def test_rollouts_are_left_as_they_are(self, scorer: RewardScorer, rollouts: Sequence[Rollout]) -> None:
        """Several rewards receive the same rollouts, and the samples file is written from them."""
        copies = copy.deepcopy(list(rollouts))
        scorer.score(copies)
        assert copies == list(rollouts), "the reward modifies the rollouts (their metadata?): modify a copy instead"

    def test_scores_in_a_process_of_its_own(
        self,
        selected: SelectedPlugin,
        config: BaseModel,
        rlhf_device: str,
        scorer: RewardScorer,
        rollouts: Sequence[Rollout],
    ) -> None:
        """`isolate: true` rebuilds the reward in another process, from its name and options alone."""
        with closing(self._scorer(selected, config, rlhf_device, isolate=True)) as isolated:
            scores = _scores(isolated, rollouts)
        assert len(scores) == len(rollouts)
        if self.deterministic:
            _check_same(scores, _scores(scorer, rollouts), "in a separate process", "in this process")


def _scores(scorer: RewardScorer, rollouts: Sequence[Rollout]) -> list[float]:
    rows = scorer.score(copy.deepcopy(list(rollouts)))  # a reward that modifies its input must not hide this
    assert all(row is not None for row in rows), "an answer was dropped instead of scored"
    return [row["it"] for row in rows if row is not None]


def _check_same(one: Sequence[float], other: Sequence[float], when: str, otherwise: str) -> None:
    different = [
        f"answer {index}: {a!r} {when}, {b!r} {otherwise}"
        for index, (a, b) in enumerate(zip(one, other, strict=True))
        if abs(a - b) > _TOLERANCE * max(1.0, abs(a), abs(b))
    ]
    assert not different, "scores differ:\n" + "\n".join(different[:4])
