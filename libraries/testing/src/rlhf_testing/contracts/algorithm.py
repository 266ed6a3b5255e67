"""The contract of an algorithm that learns from rollouts."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest
from pydantic import BaseModel

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.components import AlgorithmContext
from rlhf_core.plugins.selected import Selected
from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.types import Experience, RolloutGroup, SamplingParams

from ..benches import RolloutBench, rollout_bench
from ..samples import make_group
from ..tiny import contract_tokenizer
from .advantage import estimates_of_ranks
from .losses import LossContract

if TYPE_CHECKING:
    pass


class AlgorithmContract(LossContract):
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
    def bench(cls, selected: Selected, config: BaseModel, rlhf_device: str) -> RolloutBench:
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

    def test_it_learns_from_rollouts(self, selected: Selected) -> None:
        assert selected.component.feeds == "rollouts", f'{selected.label}: say feeds="rollouts" (the default)'

    def test_advantages_are_numbers_for_every_action(self, bench: RolloutBench) -> None:
        import torch

        output = bench.advantages()
        made, mask = output, bench.episode.action_mask
        assert made.advantages is not None, "advantages() must set the episode's advantages"
        assert made.advantages.shape == mask.shape, f"advantages {tuple(made.advantages.shape)}: [B, A] of the episode"
        assert made.advantages.dtype == torch.float32, f"advantages are {made.advantages.dtype}, not float32"
        assert bool(torch.isfinite(made.advantages).all()), "advantages are not all finite"
        assert made.advantages[mask].abs().max() > 0, "with scores of 0 and 1 every advantage is 0"
        if "critic" in bench.algorithm.roles:
            assert made.returns is not None and made.returns.shape == mask.shape, "a critic learns from `returns`"
        bad = {name: value for name, value in output.metrics.items() if not math.isfinite(value)}
        assert not bad, f"metrics of the episode are not finite: {bad}"

    def test_advantages_are_pure(self, bench: RolloutBench) -> None:
        """Every rank computes them separately and must get the same result."""
        before = copy.deepcopy(bench.episode)
        first, second = bench.advantages(), bench.advantages()
        _equal(before, bench.episode, "advantages() changes the episode it is given: return a new one")
        _equal(first, second, "advantages() of one episode differ when computed twice")
        assert first.metrics == second.metrics, "metrics of one episode differ when computed twice"

    def test_ranks_compute_what_one_computes(self, bench: RolloutBench) -> None:
        """Each of three ranks computes from the rows it `needs`; together they must get the numbers of one."""
        import torch

        from rlhf_core.batching import split

        expected = bench.advantages()
        rows = {item.sample_id: item for item in split(expected)}
        items = split(bench.episode)
        hint = (
            f"is `needs_all_rows` ({bench.algorithm.needs_all_rows}) enough, and is each sum over rows one over ranks?"
        )
        for mine, metrics in estimates_of_ranks(bench.make, RewardCombiner({"it": 1.0}), items, 3):
            for item in mine:
                one, other = item.advantages, rows[item.sample_id].advantages
                assert one is not None and other is not None
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (
                    f"sample {item.sample_id} has advantages {one} on one of three ranks, {other} on one alone: {hint}"
                )
            wrong = {
                name: (metrics[name], value)
                for name, value in expected.metrics.items()
                if not math.isclose(metrics[name], value, rel_tol=1e-4, abs_tol=1e-5)
            }
            assert not wrong, f"metrics on one of three ranks, and on a single one: {wrong}: {hint}"

    def test_scores_that_are_all_the_same(self, bench: RolloutBench) -> None:
        """As at the start and the end of many runs: every answer fails, or none does."""
        import torch

        flat = replace(bench.episode, scores=torch.zeros(len(bench.episode)))
        advantages = bench.algorithm.advantages(flat).advantages
        assert advantages is not None and bool(torch.isfinite(advantages).all())

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


def _equal(one: Experience, other: Experience, message: str) -> None:
    import dataclasses

    import torch

    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor) and torch.equal(a, b), f"{message} (`{field.name}`)"
