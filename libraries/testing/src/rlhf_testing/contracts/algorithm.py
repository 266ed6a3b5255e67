"""Contract of an algorithm that learns from rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from pydantic import BaseModel

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.components import AlgorithmContext
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.types import RolloutGroup, SamplingParams

from ..benches import RolloutBench, rollout_bench
from ..samples import make_group
from ..tiny import contract_tokenizer
from .estimates import AdvantageCase, EstimatesContract
from .losses import LossContract


class AlgorithmContract(EstimatesContract, LossContract):
    """Tests of an algorithm that learns from rollouts. Subclass it, set `plugin`, and `options` if it needs any.

    The episode is handmade: three prompts, the same number of answers each, scores of 0 and 1.

    Example:
        class TestMyAlgorithm(AlgorithmContract):
            plugin = "my-algorithm"
            options = {"kl_coef": 0.1}
    """

    kind = "algorithms"
    samples_per_prompt: ClassVar[int] = 4
    learns_from_scores: ClassVar[bool] = True
    """Whether training on an episode must increase the likelihood of its better answers."""
    learning_rate: ClassVar[float] = 1e-3
    tolerance: ClassVar[float] = 1e-4
    """Tolerance of gradients, relative to the largest component."""

    @pytest.fixture
    @classmethod
    def bench(cls, selected: SelectedPlugin, config: BaseModel, rlhf_device: str) -> RolloutBench:
        tokenizer = contract_tokenizer()
        context = AlgorithmContext(SamplingParams(max_new_tokens=8), cls.samples_per_prompt, tokenizer)
        build = selected.build

        def make() -> RolloutAlgorithm:
            algorithm = build(config, context)
            assert isinstance(algorithm, RolloutAlgorithm), (
                f"{selected.label}: build must return a RolloutAlgorithm, got a {type(algorithm).__name__} "
                '(for an algorithm that learns from a dataset, set feeds="dataset" and use DatasetAlgorithmContract)'
            )
            return algorithm

        return rollout_bench(make, samples_per_prompt=cls.samples_per_prompt, device=rlhf_device)

    def test_it_learns_from_rollouts(self, selected: SelectedPlugin) -> None:
        assert selected.component.feeds == "rollouts", f'{selected.label}: set feeds="rollouts" (the default)'

    @pytest.fixture
    @classmethod
    def advantage_case(cls, bench: RolloutBench) -> AdvantageCase:
        import torch

        flat = replace(bench.episode, scores=torch.zeros(len(bench.episode)))
        return AdvantageCase(bench.make, RewardCombiner({"it": 1.0}), bench.episode, flat)

    def test_a_critic_has_returns(self, bench: RolloutBench) -> None:
        if "critic" in bench.algorithm.roles:
            returns = bench.advantages().returns
            assert returns is not None, "advantages() must set returns, because the algorithm trains a critic"
            assert returns.shape == bench.episode.action_mask.shape, "returns must be [B, A]"

    def test_log_probs_of_the_loss(self, bench: RolloutBench) -> None:
        """The loss's log-probs determine `rollout/logprob_gap_max`. Before the first step they are the sampled ones."""
        items = bench.items()
        log_probs = bench.output(items).log_probs
        if log_probs is None:
            return
        batch = bench.algorithm.collate(items)
        assert log_probs.shape == batch.action_mask.shape, "log_probs must be [B, A]"
        assert not log_probs.requires_grad, "log_probs must be detached"
        gap = (log_probs.cpu() - batch.action_log_probs)[batch.action_mask].abs().max()
        assert gap < 1e-3, f"log_probs of an unchanged policy differ from the sampled ones by {float(gap):.3g} nats"

    def test_better_answers_become_likelier(self, bench: RolloutBench) -> None:
        if not self.learns_from_scores:
            return
        scores = bench.episode.scores
        assert scores is not None
        before, items = bench.log_probs(), bench.items()
        bench.descend(items, steps=8, lr=self.learning_rate)
        change = bench.log_probs() - before
        gained = float(change[scores > 0.5].mean() - change[scores < 0.5].mean())
        assert gained > 0, f"8 steps favored good over bad answers by {gained:.3g} nats. Is the sign wrong?"

    def test_groups_are_kept_or_refused(self, bench: RolloutBench) -> None:
        for scores in ((1.0, 0.0), (1.0, 1.0)):
            is_kept = bench.algorithm.keep(_group(scores))
            assert isinstance(is_kept, bool), f"keep(group) must return True or False, got {is_kept!r}"


def _group(scores: Sequence[float]) -> RolloutGroup:
    group = make_group(0, len(scores))
    items = tuple(
        replace(item, rewards={"it": score}, score=score) for item, score in zip(group.items, scores, strict=True)
    )
    return replace(group, items=items)
