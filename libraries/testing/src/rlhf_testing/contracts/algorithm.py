"""The contract of an algorithm that learns from rollouts."""

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
from .estimates import EstimatesContract, Estimating
from .losses import LossContract


class AlgorithmContract(EstimatesContract, LossContract):
    """An episode made by hand: three prompts, the same number of answers each, scores of 0 and 1."""

    kind = "algorithms"
    samples_per_prompt: ClassVar[int] = 4
    learns_from_scores: ClassVar[bool] = True
    """Whether training on an episode must make its better answers likelier."""
    learning_rate: ClassVar[float] = 1e-3
    tolerance: ClassVar[float] = 1e-4
    """Tolerance of gradients, relative to the largest."""

    @pytest.fixture
    @classmethod
    def bench(cls, selected: SelectedPlugin, config: BaseModel, rlhf_device: str) -> RolloutBench:
        tokenizer = contract_tokenizer()
        context = AlgorithmContext(SamplingParams(max_new_tokens=8), cls.samples_per_prompt, tokenizer)
        build = selected.build

        def make() -> RolloutAlgorithm:
            algorithm = build(config, context)
            assert isinstance(algorithm, RolloutAlgorithm), (
                f"{selected.label}: build returns a {type(algorithm).__name__}, not a RolloutAlgorithm "
                '(one that learns from a dataset says feeds="dataset" and has the DatasetAlgorithmContract)'
            )
            return algorithm

        return rollout_bench(make, samples_per_prompt=cls.samples_per_prompt, device=rlhf_device)

    def test_it_learns_from_rollouts(self, selected: SelectedPlugin) -> None:
        assert selected.component.feeds == "rollouts", f'{selected.label}: say feeds="rollouts" (the default)'

    @pytest.fixture
    @classmethod
    def estimating(cls, bench: RolloutBench) -> Estimating:
        import torch

        flat = replace(bench.episode, scores=torch.zeros(len(bench.episode)))
        return Estimating(bench.make, RewardCombiner({"it": 1.0}), bench.episode, flat)

    def test_a_critic_has_returns(self, bench: RolloutBench) -> None:
        if "critic" in bench.algorithm.roles:
            made = bench.advantages()
            assert made.returns is not None and made.returns.shape == made.action_mask.shape, (
                "a critic learns from them"
            )

    def test_log_probs_of_the_loss(self, bench: RolloutBench) -> None:
        """They determine `rollout/logprob_gap_max`; before the first step they equal the sampled ones."""
        items = bench.items()
        found = bench.output(items).log_probs
        if found is None:
            return
        batch = bench.algorithm.collate(items)
        assert found.shape == batch.action_mask.shape and not found.requires_grad, "log_probs are [B, A], detached"
        gap = (found.cpu() - batch.action_log_probs)[batch.action_mask].abs().max()
        assert gap < 1e-3, f"log_probs of an unchanged policy are {float(gap):.3g} nats off the sampled ones"

    def test_better_answers_become_likelier(self, bench: RolloutBench) -> None:
        if not self.learns_from_scores:
            return
        scores = bench.episode.scores
        assert scores is not None
        before, items = bench.log_probs(), bench.items()
        bench.descend(items, steps=8, lr=self.learning_rate)
        change = bench.log_probs() - before
        gained = float(change[scores > 0.5].mean() - change[scores < 0.5].mean())
        assert gained > 0, f"after 8 steps good answers are {gained:.3g} nats likelier against bad ones: the sign?"

    def test_groups_are_kept_or_refused(self, bench: RolloutBench) -> None:
        for scores in ((1.0, 0.0), (1.0, 1.0)):
            kept = bench.algorithm.keep(_group(scores))
            assert isinstance(kept, bool), f"keep(group) returns {kept!r}, not True or False"


def _group(scores: Sequence[float]) -> RolloutGroup:
    group = make_group(0, len(scores))
    items = tuple(
        replace(item, rewards={"it": score}, score=score) for item, score in zip(group.items, scores, strict=True)
    )
    return replace(group, items=items)
