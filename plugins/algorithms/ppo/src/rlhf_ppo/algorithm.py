"""PPO: advantages of an episode, and the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rlhf_core.algorithm import LossOutput, LossTerm, Mean
from rlhf_core.batching import pin_memory
from rlhf_core.components import AlgorithmContext
from rlhf_core.episode_view import EpisodeView
from rlhf_core.types import BufferItem, Experience, Role
from rlhf_forward import aggregate_count, masked_whiten
from rlhf_objective import (
    KLController,
    PolicyObjective,
    TextData,
    TextFile,
    adaptive_lambda,
    check_groups,
    earned_in_turns,
    gae,
    has_turns,
    text_count,
    text_loss,
)

from .config import PPOConfig
from .critic import Critic, critic_metrics, value_sum
from .critic_start import CriticStart


def build(config: PPOConfig, context: AlgorithmContext) -> PPO:
    """Build the algorithm `ppo`."""
    pretraining = None
    if config.ptx_path is not None and config.ptx_coef > 0:
        pretraining = TextFile(config.ptx_path, context.tokenizer, config.ptx_max_tokens, option="algorithm.ptx_path")
    sampling, path = context.sampling, config.critic.path
    algorithm = PPO(
        config,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        pretraining=pretraining,
        critic_start=None if path is None else CriticStart(path, context.tokenizer),
    )
    check_groups("ppo", algorithm.estimator, context.samples_per_prompt)
    return algorithm


class PPO(PolicyObjective):
    """Clipped policy and value losses. Advantages come from GAE, or from the estimator set in `advantage`."""

    config: PPOConfig

    def __init__(
        self,
        config: PPOConfig,
        *,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        pretraining: TextData | None = None,
        pin_memory: bool = False,
        critic_start: CriticStart | None = None,
    ) -> None:
        """Create the algorithm.

        Args:
            config: Options of `algorithm: {name: ppo}`.
            temperature: Sampling temperature of the rollouts.
            max_new_tokens: Maximum response length in tokens. Needed by aggregations that divide by it.
            pretraining: Text of the ptx loss.
            pin_memory: Collate into page-locked memory, so that copies to the GPU overlap with computation.
            critic_start: Start of the critic. None copies the policy.
        """
        super().__init__(config, temperature=temperature, max_new_tokens=max_new_tokens)
        self._pretraining = pretraining
        self._pin_memory = pin_memory
        self._controller = _controller(config)
        self._last_kl: tuple[float, int] | None = None
        self._num_warmed_up = 0
        self._critic_start = critic_start

    def use_pretraining(self, data: TextData) -> None:
        """Set the text source of the ptx loss, if it is only known after construction."""
        self._pretraining = data

    @property
    def roles(self) -> frozenset[Role]:
        return super().roles | {"critic"}

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        config = self.config
        terms = {**self.policy_terms(1.0 - config.ptx_coef), "value": LossTerm("critic", config.vf_coef)}
        if config.ptx_coef > 0:
            terms["ptx"] = LossTerm("policy", config.ptx_coef)
        return terms

    def build_critic(self, policy: nn.Module) -> nn.Module:
        return Critic.from_pretrained(policy) if self._critic_start is None else self._critic_start.load(policy)

    @property
    def is_warming_up(self) -> bool:
        """Whether only the critic learns in this episode."""
        return self._num_warmed_up < self.config.critic_warmup_episodes

    @property
    def kl_coef(self) -> float:
        return self._controller.value

    def turn_scores(self, episode: Experience, view: EpisodeView) -> Tensor | None:
        """Part of the scores earned in turns of an environment, [R, A]. None without an environment."""
        return earned_in_turns(episode, view) if has_turns(episode) else None

    def estimate(
        self, episode: Experience, view: EpisodeView, rewards: Tensor, kl: Tensor | None, metrics: dict[str, float]
    ) -> Experience:
        """Advantages of GAE, or of the configured estimator, whitened over the episode. Returns are always GAE's."""
        assert episode.values is not None
        config, mask = self.config, episode.action_mask
        lam: float | Tensor = config.lam
        if config.lam_alpha is not None:
            lam = adaptive_lambda(mask.sum(-1), config.lam_alpha)
            metrics["advantage/lambda_mean"] = float(adaptive_lambda(view.lengths, config.lam_alpha).mean())
        result = gae(rewards, episode.values, mask, config.gamma, lam)
        returns = result.returns
        if config.critic_lam is not None and (config.lam_alpha is not None or config.critic_lam != config.lam):
            returns = gae(rewards, episode.values, mask, config.gamma, config.critic_lam).returns
        estimated = replace(episode, advantages=result.advantages, returns=returns)
        if self.estimator is not None:
            estimated = super().estimate(estimated, view, rewards, kl, metrics)
        if config.whiten_advantages:
            assert estimated.advantages is not None
            whitened = masked_whiten(estimated.advantages, mask, all_reduce=view.all_reduce)
            estimated = replace(estimated, advantages=whitened)
        if kl is not None:
            self._last_kl = (metrics["kl/per_sample"], view.num_samples)
            metrics["kl/coef"] = self._controller.value
        metrics |= critic_metrics(episode, view, returns)
        return estimated

    def collate(self, items: Sequence[BufferItem]) -> Experience:
        batch = super().collate(items)
        if self._pretraining is not None:
            batch = self._pretraining.attach(batch, items)
        return pin_memory(batch) if self._pin_memory else batch

    def counts(self, batch: Experience) -> Mapping[str, float]:
        counts = {**super().counts(batch), "value": aggregate_count(batch.action_mask, "token-mean")}
        if "ptx" in counts:
            counts["ptx"] = text_count(batch)
        if self.is_warming_up:  # nothing of the policy counts, so that it is not stepped
            counts |= {name: 0.0 for name, term in self.terms.items() if term.role == "policy"}
        return counts

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        if self.is_warming_up:
            value, value_metrics = value_sum(models["critic"], batch, clip_eps=self.config.value_clip)
            return LossOutput({"value": value}, value_metrics)
        terms = self.terms_of(models["policy"], batch)
        sums, metrics = terms.sums, terms.metrics
        if "ptx" in self.terms:
            sums["ptx"] = text_loss(models["policy"], batch)
        if self.config.dual_clip is not None:
            metrics["policy/dual_clip_fraction"] = Mean(terms.loss.dual_clipped.sum(), batch.action_mask.sum())
        sums["value"], value_metrics = value_sum(models["critic"], batch, clip_eps=self.config.value_clip)
        return LossOutput(sums, {**metrics, **value_metrics}, terms.output.log_probs.detach())

    def set_option(self, name: str, value: float) -> None:
        """Change `kl_coef`, if a reference exists. An adaptive controller continues from the new value."""
        super().set_option(name, value)
        self._controller = _controller(self.config)

    def end_episode(self) -> None:
        """Adapt coefficients to the KL and the entropy of the episode just trained on."""
        if self.is_warming_up:
            self._num_warmed_up += 1
            self._last_kl = None
            return
        if self._last_kl is not None:
            self._controller.update(*self._last_kl)
            self._last_kl = None
        super().end_episode()

    def state_dict(self) -> dict[str, Any]:
        state = {"kl_controller": self._controller.state_dict(), **super().state_dict()}
        return {**state, "critic_warmup_episodes": self._num_warmed_up} if self._num_warmed_up else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._controller.load_state_dict(state["kl_controller"])
        self._num_warmed_up = int(state.get("critic_warmup_episodes", 0))
        super().load_state_dict(state)


def _controller(config: PPOConfig) -> KLController:
    target = config.kl_target if config.kl_controller == "adaptive" else None
    return KLController(config.kl_coef, target=target, horizon=config.kl_horizon_samples)
