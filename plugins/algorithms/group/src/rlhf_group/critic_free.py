"""The algorithm behind the whole family: named advantages, a named policy loss, a KL penalty, and no critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from rlhf_core.algorithm import EpisodeOutput, LossOutput, LossTerm, Needs, RolloutAlgorithm, needs_of
from rlhf_core.components import AlgorithmContext
from rlhf_core.config import bind_use
from rlhf_core.functional import (
    AdvantageInput,
    PolicyLoss,
    PolicyLossInput,
    aggregate_count,
    aggregate_sum,
    group_spread,
    kl_estimate,
    masked_sum,
    overlong_penalty,
    policy_metrics,
    sum_and_mean_over_ranks,
    sums_of_samples,
    to_tokens,
    token_rewards,
)
from rlhf_core.models import policy_forward
from rlhf_core.types import Experience, Role, RolloutGroup
from rlhf_core.whole import EpisodeScalars, Whole, whole_of

from .checks import check_sampling
from .config import CriticFreeConfig
from .off_policy import correct


class CriticFree(RolloutAlgorithm):
    """Learns from sampled answers with a baseline computed from the episode itself."""

    def __init__(self, config: CriticFreeConfig, context: AlgorithmContext) -> None:
        check_sampling(config, context)
        functions = {key: bind_use(use, where=f"algorithm.{key}") for key, use in config.functions().items()}
        self._config = config
        self._estimator = functions["advantage"]
        """Turns what it needs of an episode into advantages, [B] or [B, A]."""
        self._policy_loss = functions["policy_loss"]
        self._score = context.score
        self._temperature = context.sampling.temperature
        self._max_new_tokens = context.sampling.max_new_tokens
        self._norm_length = config.norm_length or context.sampling.max_new_tokens

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy", "reference"} if self._config.kl_coef > 0 else {"policy"})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        config = self._config
        terms = {"policy": LossTerm("policy")}
        if config.entropy_coef > 0:
            terms["entropy"] = LossTerm("policy", -config.entropy_coef)
        if config.kl_in == "loss" and config.kl_coef > 0:
            terms["kl"] = LossTerm("policy", config.kl_coef)
        return terms

    @property
    def needs_trainer_log_probs(self) -> bool:
        return self._config.corrects_off_policy

    def keep(self, group: RolloutGroup) -> bool:
        """With dynamic sampling, keep only groups whose samples differ in score, length penalties aside."""
        if not self._config.dynamic_sampling:
            return True
        return len({self._score(item.rewards) for item in group.items}) > 1

    @property
    def needs(self) -> Needs:
        return needs_of(self._estimator)

    def advantages(self, episode: Experience) -> EpisodeOutput:
        """Advantages from scores, length penalty and KL, times importance weights; masks tokens that must not count."""
        whole = whole_of(episode)
        config, mask = self._config, episode.action_mask
        scores, metrics = self._shaped(whole.scalars)
        spread = group_spread(scores, whole.scalars.group_ids, whole.scalars.row_sample_ids)
        metrics["group/std_mean"] = spread.std_mean
        metrics["group/without_spread_fraction"] = spread.without_spread_fraction
        kl = self._kl(episode, whole, metrics)
        advantages = self._estimated(episode, whole, scores, kl)
        if config.corrects_off_policy:
            correction = correct(config, episode, whole.all_reduce)
            advantages, mask = advantages * correction.weights, correction.kept
            metrics.update(correction.metrics)
        if config.mask_truncated:
            mask = mask & ~episode.truncated.unsqueeze(-1)
        return EpisodeOutput(replace(episode, advantages=advantages, action_mask=mask), metrics)

    def _estimated(self, episode: Experience, whole: Whole, scores: Tensor, kl: Tensor | None) -> Tensor:
        """[B, A] the estimator's advantages. `scores`: those of all rows of the whole."""
        mask, here = episode.action_mask, whole.here(scores)
        coefficient = self._config.kl_coef if episode.kl_coef is None else episode.kl_coef
        rewards = token_rewards(here, kl if self._config.kl_in == "reward" else None, coefficient, mask)
        given = AdvantageInput(rewards, mask, episode.group_ids, here, episode.row_sample_ids, whole.all_reduce)
        if self.needs == "scalars":
            totals = whole.of_all(given.totals).float()
            scalars = replace(whole.scalars, scores=scores, totals=totals, kl=_summed(kl, mask, whole))
            return to_tokens(whole.here(self._checked(self._estimator(scalars), scores.shape)), mask)
        return self._checked(self._estimator(given), mask.shape)

    def _checked(self, advantages: Tensor, shape: torch.Size) -> Tensor:
        if advantages.shape != shape:
            axes = "[B, A]" if len(shape) == 2 else "[B]"
            raise TypeError(f"the advantage estimator gave {tuple(advantages.shape)}, not {tuple(shape)} ({axes})")
        return advantages

    def _shaped(self, episode: EpisodeScalars) -> tuple[Tensor, dict[str, float]]:
        """[B] the scores of all rows, with the penalty of long answers."""
        if self._config.overlong_buffer_tokens is None:
            return episode.scores, {}
        penalty = self._config.overlong_penalty * overlong_penalty(
            sums_of_samples(episode.lengths, episode.row_sample_ids),
            max_tokens=self._max_new_tokens,
            buffer_tokens=self._config.overlong_buffer_tokens,
        )
        return episode.scores + penalty, {"reward/overlong_penalty": float(penalty.mean())}

    def _kl(self, episode: Experience, whole: Whole, metrics: dict[str, float]) -> Tensor | None:
        """[B, A] KL estimate of the sampling policy to the reference; added to `metrics`."""
        if episode.reference_log_probs is None:
            return None
        kl = kl_estimate(episode.action_log_probs, episode.reference_log_probs, self._config.kl_estimator)
        total, mean = sum_and_mean_over_ranks(kl, episode.action_mask, whole.all_reduce)
        metrics["kl/mean"] = float(mean)
        metrics["kl/per_sample"] = float(total) / whole.scalars.num_samples
        return kl

    def set_option(self, name: str, value: float) -> None:
        """`kl_coef` can be changed where there is a reference."""
        if name != "kl_coef" or self._config.kl_coef == 0 or value == 0:
            super().set_option(name, value)
        self._config = self._config.model_copy(update={name: value})

    def counts(self, batch: Experience) -> Mapping[str, float]:
        return dict.fromkeys(self.terms, aggregate_count(batch.action_mask, self._config.aggregation))

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        assert batch.advantages is not None
        mask, terms = batch.action_mask, self.terms
        output = policy_forward(
            models["policy"], batch, self._temperature, with_entropy=True, entropy_grad="entropy" in terms
        )
        assert output.entropy is not None
        # With importance weights for the engine, the ratio starts from the trainer's own log-probs.
        old = batch.action_log_probs if batch.trainer_log_probs is None else batch.trainer_log_probs
        policy = self._policy_loss(PolicyLossInput(output.log_probs, old, batch.advantages, mask))
        if not isinstance(policy, PolicyLoss):
            raise TypeError(f"the policy loss returned a {type(policy).__name__}, not a PolicyLoss")
        sums = {"policy": self._sum(policy.losses, mask)}
        if "entropy" in terms:
            sums["entropy"] = self._sum(output.entropy, mask)
        if "kl" in terms:
            assert batch.reference_log_probs is not None
            kl = kl_estimate(output.log_probs, batch.reference_log_probs, self._config.kl_estimator)
            sums["kl"] = self._sum(kl, mask)
        return LossOutput(sums, policy_metrics(policy, output, old, mask), output.log_probs.detach())

    def _sum(self, values: Tensor, mask: Tensor) -> Tensor:
        return aggregate_sum(values, mask, self._config.aggregation, self._norm_length)


def _summed(kl: Tensor | None, mask: Tensor, whole: Whole) -> Tensor | None:
    return None if kl is None else whole.of_all(masked_sum(kl.double(), mask, dim=-1))
