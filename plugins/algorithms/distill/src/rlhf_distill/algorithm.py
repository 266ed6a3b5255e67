"""`distill`: the policy samples tokens, and teachers return their log-probs.

With `top_k` the loss is a divergence between whole distributions at each sampled token (GKD). Gradients do not pass
through the sampling. Without `top_k`, the reverse KL is estimated from the sampled tokens alone: log T - log P is the
advantage of a token in a clipped policy gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from rlhf_core.algorithm import (
    FrozenModel,
    GroupPass,
    LossOutput,
    LossTerm,
    Mean,
    PassContext,
    RolloutAlgorithm,
)
from rlhf_core.components import AlgorithmContext
from rlhf_core.episode_view import EpisodeView
from rlhf_core.errors import ConfigError
from rlhf_core.types import Experience, Role
from rlhf_forward import aggregate_count, aggregate_sum, masked_sum, mean_over_ranks, policy_forward, to_tokens
from rlhf_objective import clamp_log_ratio, leave_one_out, policy_metrics, ppo_policy_loss

from .config import DistillConfig
from .divergence import divergence, with_rest
from .spans import add_closing_credit, sum_over_spans
from .teacher import IDS, LOG_PROBS, SPANS, TeacherPass
from .teachers import build_teacher


def build(config: DistillConfig, context: AlgorithmContext) -> Distill:
    """Build the algorithm `distill`. Raise `ConfigError` if its options do not fit the run."""
    if config.reward_coef > 0 and config.baseline == "group" and context.samples_per_prompt < 2:
        raise ConfigError(
            "compares the answers to each prompt, but train.samples_per_prompt is 1",
            where="algorithm.baseline",
            hint="set train.samples_per_prompt to 4 or more, or algorithm.baseline: episode",
        )
    if config.top_k > (size := len(context.tokenizer)):
        raise ConfigError(f"is {config.top_k}, but the tokenizer has {size} tokens", where="algorithm.top_k")
    return Distill(config, context)


class Distill(RolloutAlgorithm):
    """Learns from teachers, and from rewards if `reward_coef` > 0."""

    needs_all_rows = False

    def __init__(self, config: DistillConfig, context: AlgorithmContext) -> None:
        self._config = config
        self._temperature = context.sampling.temperature
        self._vocabulary = len(context.tokenizer)
        self._norm_length = config.norm_length or context.sampling.max_new_tokens
        self._teachers = {
            place.removeprefix("teachers."): build_teacher(place, each, context, top_k=config.top_k)
            for place, each in config.by_place.items()
        }

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy", *(each.source for each in self._teachers.values() if isinstance(each.source, str))})

    @property
    def frozen_models(self) -> Mapping[Role, FrozenModel]:
        return {
            place: FrozenModel(
                each.path, dtype=each.dtype, offload=each.offload, own_tokenizer=each.tokenizer is not None
            )
            for place, each in self._config.by_place.items()
            if each.path is not None
        }

    def passes(self, context: PassContext) -> Sequence[GroupPass]:
        config = self._config
        with_spans = any(each.may_skip for each in config.by_place.values())
        return [
            TeacherPass(
                context,
                self._teachers,
                top_k=config.top_k,
                vocabulary=self._vocabulary,
                key=config.teacher_key,
                with_spans=with_spans,
            )
        ]

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        config = self._config
        terms = {"distill": LossTerm("policy", config.distill_coef)} if config.top_k else {}
        if config.reward_coef > 0 or not config.top_k:
            terms["policy"] = LossTerm("policy")
        return terms

    def advantages(self, episode: Experience) -> Experience:
        """Set advantages [B, A]: log-ratios of sampled tokens (without `top_k`), plus rewards if `reward_coef` > 0."""
        view, config, mask = EpisodeView.of(episode), self._config, episode.action_mask
        advantages = torch.zeros(mask.shape)
        metrics: dict[str, float] = {}
        if not config.top_k:
            ours, taught = episode.action_log_probs, taught_tokens(episode)
            if SPANS in episode.columns:
                ours = sum_over_spans(ours, episode.columns[SPANS])
            gain = clamp_log_ratio(episode.columns[LOG_PROBS].squeeze(-1) - ours)
            # Subtracting the mean over the episode leaves the expected gradient unchanged and reduces its variance.
            mean = mean_over_ranks(gain, taught, view.all_reduce)
            metrics["distill/reverse_kl"] = -float(mean)
            gain = torch.where(taught, gain - mean, 0.0)
            if any(each.tokenizer is not None for each in config.by_place.values()):
                gain = add_closing_credit(gain, episode.columns[SPANS])
            advantages = config.distill_coef * gain
        if config.reward_coef > 0:
            advantages = advantages + config.reward_coef * to_tokens(view.local(self._reward_advantages(view)), mask)
        return replace(episode, advantages=advantages, metrics=metrics)

    def _reward_advantages(self, view: EpisodeView) -> Tensor:
        """Advantages of all rows of the episode from rewards, [B]."""
        groups = view.group_ids if self._config.baseline == "group" else torch.zeros_like(view.group_ids)
        return leave_one_out(view.scores, groups, view.row_sample_ids)

    def counts(self, batch: Experience) -> Mapping[str, float]:
        masks = {"distill": taught_tokens(batch), "policy": self._policy_tokens(batch)}
        return {name: aggregate_count(masks[name], self._config.aggregation) for name in self.terms}

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        assert batch.advantages is not None
        mask, terms, eps = batch.action_mask, self.terms, self._config.clip_eps
        ids = batch.columns[IDS][mask].long() if IDS in batch.columns else None
        read = None if ids is None else partial(with_rest, ids=ids)
        output = policy_forward(
            models["policy"], batch, self._temperature, with_entropy=True, entropy_grad=False, read=read
        )
        old = batch.action_log_probs
        policy = ppo_policy_loss(output.log_probs, old, batch.advantages, mask, clip_eps_low=eps, clip_eps_high=eps)
        sums: dict[str, Tensor] = {}
        if "policy" in terms:
            sums["policy"] = self._sum(policy.losses, self._policy_tokens(batch))
        metrics: dict[str, Mean] = dict(policy_metrics(policy, output, old, mask))
        if output.read is not None:
            config, teacher = self._config, batch.columns[LOG_PROBS]
            taught = taught_tokens(batch)
            losses = divergence(output.read, teacher, config.divergence, jsd_weight=config.jsd_weight)
            sums["distill"] = self._sum(losses, taught)
            metrics["distill/teacher_mass"] = Mean(masked_sum(teacher[..., :-1].exp().sum(-1), taught), taught.sum())
        return LossOutput(sums, metrics, output.log_probs.detach())

    def _policy_tokens(self, batch: Experience) -> Tensor:
        """Return [B, A] bool: the tokens of the policy gradient, without untaught ones unless rewards count."""
        return batch.action_mask if self._config.reward_coef > 0 else taught_tokens(batch)

    def _sum(self, values: Tensor, mask: Tensor) -> Tensor:
        return aggregate_sum(values, mask, self._config.aggregation, self._norm_length)


def taught_tokens(batch: Experience) -> Tensor:
    """Return [B, A] bool: the sampled tokens that have a teacher's value."""
    spans: Tensor | None = batch.columns.get(SPANS)
    return batch.action_mask if spans is None else batch.action_mask & (spans >= 0)
