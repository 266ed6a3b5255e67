"""What the algorithms with a policy loss share: the loss by name, entropy, KL, long and off-policy answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from ..algorithm import LossTerm, Metric
from ..config import bind_use
from ..config.policy_objective import PolicyObjectiveSection
from ..errors import ConfigError
from ..functional import (
    DivergenceBound,
    EntropyController,
    EpisodeTokens,
    PolicyLoss,
    PolicyLossInput,
    aggregate_count,
    aggregate_sum,
    kl_estimate,
    mean_over_ranks,
    off_policy_correction,
    overlong_penalty,
    policy_metrics,
    sum_and_mean_over_ranks,
    sums_of_samples,
    uniforms,
)
from ..models import policy_forward
from ..types import Experience
from ..whole import EpisodeScalars, Whole

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..models.forward import PolicyOutput


_DRAWS = 0x436F76
"""Seed of the noise of `EpisodeTokens`: samples have numbers of their own in a run."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The policy's part of a micro-batch's loss."""

    sums: dict[str, Tensor]
    """Term -> its sum over the micro-batch: `policy`, and `entropy` and `kl` where they are on."""
    metrics: dict[str, Metric]
    output: PolicyOutput
    loss: PolicyLoss


@dataclass(frozen=True, slots=True)
class ShapedScores:
    """Scores of all rows of an episode, with the penalty of long answers."""

    scores: Tensor
    """[B] float32."""
    penalty: Tensor | None
    """[B] float32, at most 0; None where it is off."""
    metrics: dict[str, float]


class PolicyObjective:
    """The options of a `PolicyObjectiveSection` at work: an algorithm has one, and adds what is its own.

    `advantages()` calls `shaped`, `kl` and `corrected`; `loss()` calls `terms_of`; `end_episode()`, `state_dict()` and
    `load_state_dict()` call the same of it.
    """

    def __init__(self, config: PolicyObjectiveSection, *, temperature: float, max_new_tokens: int | None) -> None:
        """max_new_tokens: longest answer; None where it is not known.

        Raises `PluginError` and `ConfigError`: a function that is not there, or options that cannot work.
        """
        _check_overlong(config, max_new_tokens)
        functions = {key: bind_use(use, where=f"algorithm.{key}") for key, use in config.functions().items()}
        self.config = config
        self.functions: Mapping[str, Callable[..., Any]] = functions
        """Option -> the function it names, bound; those of the section's subclass, too."""
        own_kl: Any = config.own_kl
        self._kl = functions["kl_estimator"] if own_kl is None else partial(kl_estimate, estimator=own_kl)
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._norm_length = config.norm_length or max_new_tokens
        self._entropy: EntropyController | None = None
        if config.entropy_target is not None:
            self._entropy = EntropyController(
                config.entropy_coef, config.entropy_target, step=config.entropy_coef_step, most=config.entropy_coef_max
            )

    @property
    def has_reference(self) -> bool:
        return self.config.kl_coef > 0

    def set_kl_coef(self, value: float) -> None:
        """Change the coefficient of a running run."""
        self.config = self.config.model_copy(update={"kl_coef": value})

    def terms(self, share: float = 1.0) -> dict[str, LossTerm]:
        """The loss terms of the policy, `share` of each."""
        config = self.config
        terms = {"policy": LossTerm("policy", share)}
        if self._entropy is not None or config.entropy_coef > 0:
            terms["entropy"] = LossTerm("policy", -self._entropy_coef * share)
        if config.kl_in == "loss" and config.kl_coef > 0:
            terms["kl"] = LossTerm("policy", config.kl_coef * share)
        return terms

    @property
    def _entropy_coef(self) -> float:
        return self.config.entropy_coef if self._entropy is None else self._entropy.value

    def count(self, batch: Experience) -> float:
        """The batch's part of what each of these terms is divided by."""
        return aggregate_count(batch.action_mask, self.config.aggregation)

    def shaped(self, episode: EpisodeScalars) -> ShapedScores:
        """The scores less the penalty of long answers."""
        config, longest = self.config, self._max_new_tokens
        if config.overlong_buffer_tokens is None:
            return ShapedScores(episode.scores, None, {})
        assert longest is not None
        lengths = sums_of_samples(episode.lengths, episode.row_sample_ids)
        penalty = config.overlong_penalty * overlong_penalty(
            lengths, max_tokens=longest, buffer_tokens=config.overlong_buffer_tokens
        )
        return ShapedScores(episode.scores + penalty, penalty, {"reward/overlong_penalty": float(penalty.mean())})

    def kl(self, episode: Experience, whole: Whole, metrics: dict[str, float]) -> Tensor | None:
        """[R, A] KL of the policy that sampled to the reference, its means added to `metrics`; None without one."""
        if episode.reference_log_probs is None:
            return None
        kl: Tensor = self._kl(episode.action_log_probs, episode.reference_log_probs)
        total, mean = sum_and_mean_over_ranks(kl, episode.action_mask, whole.all_reduce)
        metrics["kl/mean"] = float(mean)
        metrics["kl/per_sample"] = float(total) / whole.scalars.num_samples
        return kl

    def corrected(self, episode: Experience, advantages: Tensor, whole: Whole, metrics: dict[str, float]) -> Experience:
        """The episode with these advantages [R, A] times importance weights, and with a mask of what counts.

        Multiplied into the advantages, as every loss is proportional to them. Collective.
        """
        mask = episode.action_mask
        if self._entropy is not None:
            self._measure_entropy(self._entropy, episode, whole, metrics)
        if self.config.corrects_off_policy:
            weights, mask = self._weights(episode, whole, metrics)
            advantages = advantages * weights
        if self.config.mask_truncated:
            mask = mask & ~episode.truncated.unsqueeze(-1)
        found = replace(episode, advantages=advantages, action_mask=mask)
        loss = self.functions["policy_loss"]
        choose = getattr(loss, "choose", None)
        if choose is None:
            return found
        known = signature(choose).parameters
        options = {name: value for name, value in getattr(loss, "keywords", {}).items() if name in known}
        chosen = choose(episode_tokens(found, whole), **options)
        return replace(found, marks=(chosen & mask).float())

    def _measure_entropy(
        self, controller: EntropyController, episode: Experience, whole: Whole, metrics: dict[str, float]
    ) -> None:
        """Of the policy that sampled: the mean of -log p over its own tokens, whose expectation the entropy is."""
        entropy = -float(mean_over_ranks(episode.action_log_probs, episode.action_mask, whole.all_reduce))
        controller.measure(entropy)
        metrics["policy/sampled_entropy"] = entropy
        metrics["policy/entropy_coef"] = controller.value

    def end_episode(self) -> None:
        """Adapt the entropy coefficient to the episode that was trained on."""
        if self._entropy is not None:
            self._entropy.update()

    def state_dict(self) -> dict[str, Any]:
        """State to keep across a resume; nothing where nothing adapts."""
        return {} if self._entropy is None else {"entropy_coef": self._entropy.coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; a state without an entropy coefficient leaves it where it begins."""
        if self._entropy is not None and "entropy_coef" in state:
            self._entropy.coefficient = float(state["entropy_coef"])

    def _weights(self, episode: Experience, whole: Whole, metrics: dict[str, float]) -> tuple[Tensor, Tensor]:
        """[R, A] weights, 0 where not kept, and the mask of what is kept."""
        import torch

        assert episode.trainer_log_probs is not None
        config, mask, reduce = self.config, episode.action_mask, whole.all_reduce
        result = off_policy_correction(
            episode.trainer_log_probs,
            episode.action_log_probs,
            mask,
            cap=config.importance_cap,
            level=config.importance_level,
            token_range=config.importance_token_range,
            sequence_range=config.importance_sequence_range,
            outlier_range=config.importance_outlier_range,
            divergence=None
            if config.divergence_bound is None
            else DivergenceBound(config.divergence_bound, config.divergence_estimator, config.divergence_level),
            all_reduce=reduce,
        )
        metrics |= {
            "off_policy/effective_sample_size": float(result.effective_sample_size),
            "off_policy/weight_mean": float(mean_over_ranks(result.weights, result.kept, reduce)),
            "off_policy/truncated_fraction": float(mean_over_ranks(result.truncated.float(), mask, reduce)),
            "off_policy/masked_fraction": 1.0 - float(mean_over_ranks(result.kept.float(), mask, reduce)),
            "off_policy/ratio_max": float(whole.all_reduce(torch.where(mask, result.ratio, 0.0).max(), "max")),
        }
        return result.weights, result.kept

    def terms_of(self, policy: nn.Module, batch: Experience) -> PolicyTerms:
        """Forward a micro-batch through the policy: the sums of `terms`."""
        assert batch.advantages is not None
        mask, terms = batch.action_mask, self.terms()
        learns_entropy = self._entropy_coef > 0
        output = policy_forward(policy, batch, self._temperature, with_entropy=True, entropy_grad=learns_entropy)
        assert output.entropy is not None
        # With importance weights for the engine, the ratio starts from the trainer's own log-probs.
        old = batch.action_log_probs if batch.trainer_log_probs is None else batch.trainer_log_probs
        marked = None if batch.marks is None else batch.marks > 0
        given = PolicyLossInput(output.log_probs, old, batch.advantages, mask, marked)
        loss = self.functions["policy_loss"](given)
        if not isinstance(loss, PolicyLoss):
            raise TypeError(f"the policy loss returned a {type(loss).__name__}, not a PolicyLoss")
        sums = {"policy": self._sum(loss.losses, mask)}
        if "entropy" in terms:
            sums["entropy"] = self._sum(output.entropy, mask)
        if "kl" in terms:
            assert batch.reference_log_probs is not None
            sums["kl"] = self._sum(self._kl(output.log_probs, batch.reference_log_probs), mask)
        return PolicyTerms(sums, policy_metrics(loss, output, old, mask), output, loss)

    def _sum(self, values: Tensor, mask: Tensor) -> Tensor:
        return aggregate_sum(values, mask, self.config.aggregation, self._norm_length)


def episode_tokens(rows: Experience, whole: Whole) -> EpisodeTokens:
    """What a policy loss chooses from, of rows with their advantages."""
    import torch

    assert rows.advantages is not None
    mask = rows.action_mask
    old = rows.action_log_probs if rows.trainer_log_probs is None else rows.trainer_log_probs
    places = torch.arange(mask.shape[-1], device=mask.device)
    branches = 0 if rows.branches is None else rows.branches.unsqueeze(-1)
    lengths = whole.of_all(mask.sum(-1)).long()
    firsts = whole.here(lengths.cumsum(0) - lengths).unsqueeze(-1)
    index = (firsts + mask.long().cumsum(-1) - 1)[mask]

    def all_tokens(values: Tensor) -> Tensor:
        placed = torch.zeros(int(lengths.sum()), dtype=torch.float64, device=mask.device)
        placed[index] = values[mask].double()
        return whole.all_reduce(placed)

    return EpisodeTokens(
        log_probs=torch.where(mask, old, 0.0),
        advantages=torch.where(mask, rows.advantages, 0.0),
        mask=mask,
        draws=uniforms(_DRAWS, rows.sample_ids.unsqueeze(-1), (branches << 32) + places),
        all_tokens=all_tokens,
    )


def _check_overlong(config: PolicyObjectiveSection, longest: int | None) -> None:
    buffer = config.overlong_buffer_tokens
    if buffer is not None and (longest is None or buffer > longest):
        known = f"the longest answer ({longest} tokens)" if longest is not None else "an answer of unknown length"
        raise ConfigError(
            f"is {buffer}, more than {known}",
            where="algorithm.overlong_buffer_tokens",
            hint=f"at most engine.max_new_tokens{f' = {longest}' if longest else ''}; DAPO took a fifth of it",
        )
