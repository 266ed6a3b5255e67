"""PPO: advantages over an episode, and the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rlhf_core.algorithm import EpisodeOutput, LossOutput, LossTerm, Mean, Metric, Needs, RolloutAlgorithm
from rlhf_core.batching import pinned
from rlhf_core.components import AlgorithmContext
from rlhf_core.functional import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    aggregate_count,
    aggregate_sum,
    explained_variance,
    gae,
    kl_estimate,
    masked_whiten,
    mean_over_ranks,
    policy_metrics,
    ppo_policy_loss,
    sum_and_mean_over_ranks,
    token_rewards,
    truncated_importance_weights,
    value_loss,
)
from rlhf_core.models import policy_forward, value_forward
from rlhf_core.types import BufferItem, Experience, Role
from rlhf_core.whole import Whole, whole_of

from .config import PPOConfig
from .critic import Critic
from .pretraining import PretrainingData, PretrainingFile, pretraining_count, pretraining_loss


def build(config: PPOConfig, context: AlgorithmContext) -> PPO:
    """Build the algorithm `ppo`."""
    pretraining = None
    if config.ptx_path is not None and config.ptx_coef > 0:
        pretraining = PretrainingFile(config.ptx_path, context.tokenizer, config.ptx_max_tokens)
    return PPO(
        config,
        temperature=context.sampling.temperature,
        max_new_tokens=context.sampling.max_new_tokens,
        pretraining=pretraining,
    )


class PPO(RolloutAlgorithm):
    """Clipped policy and value losses on advantages from GAE."""

    def __init__(
        self,
        config: PPOConfig,
        *,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        pretraining: PretrainingData | None = None,
        pin_memory: bool = False,
    ) -> None:
        """`pin_memory`: collate into page-locked memory, from which a GPU copies while it computes."""
        self._config = config
        self._temperature = temperature
        self._norm_length = config.norm_length or max_new_tokens
        self._pretraining = pretraining
        self._pin_memory = pin_memory
        self._controller = _controller(config)
        self._last_kl: tuple[float, int] | None = None

    def use_pretraining(self, data: PretrainingData) -> None:
        """Set the text source of the ptx loss, for callers that know it only after construction."""
        self._pretraining = data

    @property
    def roles(self) -> frozenset[Role]:
        needs_reference = self._config.kl_coef > 0
        return frozenset({"policy", "critic", "reference"} if needs_reference else {"policy", "critic"})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        config = self._config
        share = 1.0 - config.ptx_coef
        terms = {"policy": LossTerm("policy", share), "value": LossTerm("critic", config.vf_coef)}
        if config.entropy_coef > 0:
            terms["entropy"] = LossTerm("policy", -config.entropy_coef * share)
        if config.kl_in == "loss" and config.kl_coef > 0:
            terms["kl"] = LossTerm("policy", config.kl_coef * share)
        if config.ptx_coef > 0:
            terms["ptx"] = LossTerm("policy", config.ptx_coef)
        return terms

    @property
    def needs_trainer_log_probs(self) -> bool:
        return self._config.importance_cap is not None

    def build_critic(self, policy: nn.Module) -> nn.Module:
        return Critic.from_pretrained(policy)

    @property
    def needs(self) -> Needs:
        return "row"

    def advantages(self, episode: Experience) -> EpisodeOutput:
        """Compute per-token rewards (score on the last action, KL on each), GAE, and whiten over the episode."""
        assert episode.scores is not None and episode.values is not None
        config, mask, whole = self._config, episode.action_mask, whole_of(episode)
        kl = self._kl(episode)
        in_reward = kl if config.kl_in == "reward" else None
        coefficient = self._controller.value if episode.kl_coef is None else episode.kl_coef
        rewards = token_rewards(episode.scores, in_reward, coefficient, mask, episode.turn_rewards)
        result = gae(rewards, episode.values, mask, config.gamma, config.lam)
        advantages = result.advantages
        if config.whiten_advantages:
            advantages = masked_whiten(advantages, mask, all_reduce=whole.all_reduce)
        metrics = self._episode_metrics(episode, whole, kl, result.returns)
        if config.importance_cap is not None:
            advantages = advantages * self._importance(episode, whole, config.importance_cap, metrics)
        return EpisodeOutput(replace(episode, advantages=advantages, returns=result.returns), metrics)

    def _importance(self, episode: Experience, whole: Whole, cap: float, metrics: dict[str, float]) -> Tensor:
        """[B, A] truncated importance weights, trainer's policy over sampling policy; logged in `metrics`."""
        assert episode.trainer_log_probs is not None
        mask, reduce = episode.action_mask, whole.all_reduce
        result = truncated_importance_weights(
            episode.trainer_log_probs, episode.action_log_probs, mask, cap=cap, all_reduce=reduce
        )
        metrics["off_policy/effective_sample_size"] = float(result.effective_sample_size)
        metrics["off_policy/weight_mean"] = float(mean_over_ranks(result.weights, mask, reduce))
        metrics["off_policy/truncated_fraction"] = float(mean_over_ranks(result.truncated.float(), mask, reduce))
        return result.weights

    def _kl(self, episode: Experience) -> Tensor | None:
        """[B, A] KL estimate of the sampling policy to the reference."""
        if episode.reference_log_probs is None:
            return None
        return kl_estimate(episode.action_log_probs, episode.reference_log_probs, self._config.kl_estimator)

    def _episode_metrics(
        self, episode: Experience, whole: Whole, kl: Tensor | None, returns: Tensor
    ) -> dict[str, float]:
        assert episode.values is not None
        mask, reduce = episode.action_mask, whole.all_reduce
        metrics = {
            "value/mean": float(mean_over_ranks(episode.values, mask, reduce)),
            "returns/mean": float(mean_over_ranks(returns, mask, reduce)),
        }
        explained = explained_variance(episode.values, returns, mask, reduce)
        if explained is not None:
            metrics["value/explained_variance"] = explained
        if kl is not None:
            total, mean = sum_and_mean_over_ranks(kl, mask, reduce)
            per_sample = float(total) / whole.scalars.num_samples
            self._last_kl = (per_sample, whole.scalars.num_samples)
            metrics["kl/mean"] = float(mean)
            metrics["kl/per_sample"] = per_sample
            metrics["kl/coef"] = self._controller.value
        return metrics

    def collate(self, items: Sequence[BufferItem]) -> Experience:
        batch = super().collate(items)
        if self._pretraining is not None:
            batch = self._pretraining.attach(batch, items)
        return pinned(batch) if self._pin_memory else batch

    def counts(self, batch: Experience) -> Mapping[str, float]:
        count = aggregate_count(batch.action_mask, self._config.aggregation)
        counts = dict.fromkeys(self.terms, count)
        counts["value"] = aggregate_count(batch.action_mask, "token-mean")
        if "ptx" in counts:
            counts["ptx"] = pretraining_count(batch)
        return counts

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        assert batch.advantages is not None
        config, mask = self._config, batch.action_mask
        learns_entropy = "entropy" in self.terms
        output = policy_forward(
            models["policy"], batch, self._temperature, with_entropy=True, entropy_grad=learns_entropy
        )
        assert output.entropy is not None
        # With importance weights for the engine, the ratio starts from the trainer's own log-probs.
        old = batch.action_log_probs if batch.trainer_log_probs is None else batch.trainer_log_probs
        policy = ppo_policy_loss(
            output.log_probs,
            old,
            batch.advantages,
            mask,
            clip_eps_low=config.clip_eps,
            clip_eps_high=config.clip_eps if config.clip_eps_high is None else config.clip_eps_high,
            dual_clip=config.dual_clip,
        )
        sums = {"policy": self._sum(policy.losses, mask)}
        if learns_entropy:
            sums["entropy"] = self._sum(output.entropy, mask)
        if "kl" in self.terms:
            assert batch.reference_log_probs is not None
            kl = kl_estimate(output.log_probs, batch.reference_log_probs, config.kl_estimator)
            sums["kl"] = self._sum(kl, mask)
        if "ptx" in self.terms:
            sums["ptx"] = pretraining_loss(models["policy"], batch)
        metrics = policy_metrics(policy, output, old, mask)
        if config.dual_clip is not None:
            metrics["policy/dual_clip_fraction"] = Mean(policy.dual_clipped.sum(), mask.sum())
        sums["value"], value_metrics = self._value_sum(models["critic"], batch)
        return LossOutput(sums, {**metrics, **value_metrics}, output.log_probs.detach())

    def _sum(self, values: Tensor, mask: Tensor) -> Tensor:
        return aggregate_sum(values, mask, self._config.aggregation, self._norm_length)

    def _value_sum(self, critic: nn.Module, batch: Experience) -> tuple[Tensor, dict[str, Metric]]:
        assert batch.values is not None and batch.returns is not None
        mask = batch.action_mask
        result = value_loss(
            value_forward(critic, batch), batch.values, batch.returns, mask, clip_eps=self._config.value_clip
        )
        clipped = Mean(result.clipped.sum(), mask.sum())
        return aggregate_sum(result.losses, mask, "token-mean"), {"value/clip_fraction": clipped}

    def set_option(self, name: str, value: float) -> None:
        """Change `kl_coef`, where there is a reference; an adaptive controller continues from the new value."""
        if name != "kl_coef" or self._config.kl_coef == 0 or value == 0:
            super().set_option(name, value)
        self._config = self._config.model_copy(update={name: value})
        self._controller = _controller(self._config)

    def end_episode(self) -> None:
        """Adapt the KL coefficient to the KL of the episode just trained on."""
        if self._last_kl is not None:
            self._controller.update(*self._last_kl)
            self._last_kl = None

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self._controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._controller.load_state_dict(state["kl_controller"])


def _controller(config: PPOConfig) -> KLController:
    if config.kl_controller == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, config.kl_target, config.kl_horizon_samples)
