"""One update of an algorithm on ranks that are threads: its terms and its gradient, summed over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.batching import collate, split
from rlhf_core.columns import Columns
from rlhf_core.components import AlgorithmContext
from rlhf_core.plugins.selected import load
from rlhf_core.rewards.combiner import RewardCombiner
from rlhf_core.rollout import collected_episode
from rlhf_core.rollout.samples import GREEDY_COLUMNS, GREEDY_REWARDS
from rlhf_core.strategy import Strategy
from rlhf_core.training.batches import BatchPlan, Units
from rlhf_core.training.estimates import EpisodeEstimator
from rlhf_core.types import BufferItem, PhaseTimes, SamplingParams
from rlhf_forward import policy_forward
from rlhf_group.score_norms import SCORE_NORM, ScoreNormPass
from rlhf_testing.models import tiny_model, tiny_tokenizer
from rlhf_testing.samples import make_item
from rlhf_testing.thread_ranks import Ranks

Update = tuple[dict[str, float], torch.Tensor, dict[str, float]]
"""Terms, each over its count; their gradient as one vector; metrics of the episode."""
REWARDS = {"length": 1.0, "form": 0.5}
_LONGEST = 7


def one_update(section: Mapping[str, Any], world_size: int) -> list[Update]:
    """What each rank gets, all of them alike."""
    policy = tiny_model(seed=0)
    options = {key: value for key, value in section.items() if key != "name"}
    selected = load("algorithms", section["name"])
    config = selected.component.config.model_validate(options)
    context = AlgorithmContext(
        sampling=SamplingParams(max_new_tokens=_LONGEST), samples_per_prompt=3, tokenizer=tiny_tokenizer()
    )

    def work(rank: int, strategy: Strategy) -> Update:
        algorithm = selected.build(config, context)
        return _update(algorithm, policy, BatchPlan(11, 1, rank, world_size, Units(algorithm.units)), strategy)

    return Ranks(world_size).run(work)


def _update(algorithm: RolloutAlgorithm, policy: nn.Module, plan: BatchPlan, strategy: Strategy) -> Update:
    combiner = RewardCombiner(REWARDS)
    made = EpisodeEstimator(algorithm, combiner, strategy, plan).of(collected_episode(_items(), PhaseTimes()), 0)
    batch = next(iter(next(iter(made.epochs))))
    models = {"policy": policy}
    if "critic" in algorithm.roles:
        models["critic"] = algorithm.build_critic(policy)
    units = algorithm.units(batch)
    cuts = [list(chain.from_iterable(units[start : start + 2])) for start in range(0, len(units), 2)]
    outputs = [(algorithm.loss(models, part), algorithm.counts(part)) for part in map(algorithm.collate, cuts)]
    counts = {
        name: float(
            strategy.all_reduce(torch.tensor(math.fsum(each[name] for _, each in outputs), dtype=torch.float64))
        )
        for name in algorithm.terms
    }
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    total, told = torch.zeros(()), {}
    for name, term in algorithm.terms.items():
        part = torch.stack([output.sums[name] for output, _ in outputs]).sum() / max(counts[name], 1.0)
        total = total + term.coefficient * part
        told[name] = float(strategy.all_reduce(part.detach().double()))
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    flat = torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, gradients, strict=True)]
    )
    return told, strategy.all_reduce(flat), made.metrics


@cache
def _items() -> tuple[BufferItem, ...]:
    """Fifteen answers to five prompts, sampled by a policy near to the model, with a third near to both."""
    generator = torch.Generator().manual_seed(2)
    plain = []
    for sample in range(15):
        length = 1 + (sample * 4) % _LONGEST
        rewards = {"length": float(sample % 4), "form": float(sample % 2)}
        item = replace(make_item(sample, group_id=sample // 3, num_actions=length), rewards=rewards)
        greedy = {GREEDY_REWARDS: {"length": float(sample // 3 % 2), "form": 0.5}}
        norms = {SCORE_NORM: torch.rand(length, generator=generator)}
        item = replace(item, columns=Columns({**greedy, **norms}, {**GREEDY_COLUMNS, **ScoreNormPass.columns}))
        plain.append(replace(item, truncated=length == _LONGEST, values=torch.randn(length, generator=generator) / 5))
    batch = collate(plain)
    with torch.no_grad():
        now = policy_forward(tiny_model(seed=0), batch, 1.0).log_probs
    old, reference, trainer = (now + torch.randn(now.shape, generator=generator) / 8 for _ in range(3))
    near = {"action_log_probs": old, "reference_log_probs": reference, "trainer_log_probs": trainer}
    masked = {name: torch.where(batch.action_mask, values, 0.0) for name, values in near.items()}
    return tuple(split(replace(batch, **masked)))
