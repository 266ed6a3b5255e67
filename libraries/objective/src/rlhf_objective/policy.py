"""The policy objective: a named loss, entropy, KL, and corrections for long and off-policy answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_core.algorithm import GroupPass, LossOutput, LossTerm, Mean, PassContext, RolloutAlgorithm
from rlhf_core.columns import Column
from rlhf_core.episode_view import EpisodeView
from rlhf_core.errors import ConfigError
from rlhf_core.types import Experience, Role
from rlhf_forward import (
    RefreshedReference,
    aggregate_count,
    aggregate_sum,
    mean_over_ranks,
    model_passes,
    policy_forward,
)
from rlhf_forward.masking import sum_and_mean_over_ranks

from . import EntropyController, PolicyLoss, PolicyLossInput, importance_ratio, overlong_penalty, policy_metrics
from .correction import importance_weights
from .declarations import credits_turns, estimator_passes, needs_greedy_answer, needs_of
from .estimate import check_overlong, estimated
from .flat_groups import FlatGroups
from .functional.advantages import sums_of_samples, token_rewards
from .marked_tokens import COLUMNS, MARKS, with_marks
from .penalties import LENGTH_PENALTY
from .section import PolicyObjectiveSection
from .turn_inputs import earned_in_turns, has_turns

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_forward.forward import PolicyOutput


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The policy's part of a micro-batch's loss."""

    sums: dict[str, Tensor]
    """Term -> its sum over the micro-batch: `policy`, and `entropy` and `kl` if they are on."""
    metrics: dict[str, Mean]
    """Metrics of `policy_metrics`."""
    output: PolicyOutput
    """Result of the policy's forward pass."""
    loss: PolicyLoss
    """Result of the policy loss."""


class PolicyObjective(RolloutAlgorithm):
    """An algorithm without a critic, configured by a `PolicyObjectiveSection`.

    A subclass may override `estimate`, `turn_scores` and `policy_terms`.

    Example:
        class Grpo(PolicyObjective): ...

        def build(config: GrpoConfig, context: AlgorithmContext) -> Grpo:  # options with `advantage`
            sampling = context.sampling
            return Grpo(config, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)
    """

    columns: Mapping[str, Column] = COLUMNS

    def __init__(self, config: PolicyObjectiveSection, *, temperature: float, max_new_tokens: int | None) -> None:
        """Bind the functions of the section. Raises `PluginError` and `ConfigError` for missing or wrong functions.

        Args:
            config: Options of the algorithm.
            temperature: Sampling temperature of answers.
            max_new_tokens: Maximum length of an answer. None if unknown.
        """
        check_overlong(config, max_new_tokens)
        functions = {key: use.bind(where=f"algorithm.{key}") for key, use in config.functions().items()}
        self.config = config
        self.functions: Mapping[str, Callable[..., Any]] = functions
        """Option -> function with bound options, including those of the section's subclass."""
        self.estimator = functions.get("advantage")
        """Advantage estimator, which returns [B] or [B, A]. None if the section does not have the option."""
        self._kl = functions["kl_estimator"]
        self.temperature = temperature
        """Sampling temperature of answers and of all log-probs."""
        self._max_new_tokens = max_new_tokens
        self._norm_length = config.norm_length or max_new_tokens
        self._flat_groups = FlatGroups(self.estimator)
        self._entropy: EntropyController | None = None
        if config.entropy_target is not None:
            self._entropy = EntropyController(
                config.entropy_coef, config.entropy_target, step=config.entropy_coef_step, most=config.entropy_coef_max
            )

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy", "reference"} if self.config.kl_coef > 0 else {"policy"})

    @property
    def needs_all_rows(self) -> bool:
        return self.estimator is not None and needs_of(self.estimator) == "episode"

    @property
    def needs_greedy_answer(self) -> bool:
        return needs_greedy_answer(self.estimator)

    @property
    def needs_trainer_log_probs(self) -> bool:
        return self.config.corrects_off_policy

    def policy_log_probs(self, policy: nn.Module, batch: Experience) -> Tensor:
        return policy_forward(policy, batch, self.temperature).log_probs

    def passes(self, context: PassContext) -> Sequence[GroupPass]:
        roles, every = self.roles, self.config.reference_every
        of_models = model_passes(context, roles)
        if every is not None:
            if "reference" not in roles:
                problem = "refreshes a reference, but kl_coef: 0 runs without one"
                raise ConfigError(problem, where="algorithm.reference_every", hint="remove it, or set kl_coef above 0")
            refreshed = RefreshedReference(context, every=every, mix=self.config.reference_mix)
            of_models = [refreshed, *model_passes(context, roles - {"reference"})]
        return [*of_models, *estimator_passes(self.estimator, context)]

    def set_option(self, name: str, value: float) -> None:
        """Change `kl_coef`. Raises `UserInputError` for other options, for 0, and if `kl_coef` was 0 (no reference)."""
        if name != "kl_coef" or self.config.kl_coef == 0 or value == 0:
            super().set_option(name, value)
        self.config = self.config.model_copy(update={name: value})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        return self.policy_terms()

    def policy_terms(self, share: float = 1.0) -> dict[str, LossTerm]:
        """Return the loss terms of the policy, with coefficients multiplied by `share`."""
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

    def counts(self, batch: Experience) -> Mapping[str, float]:
        return dict.fromkeys(self.terms, aggregate_count(batch.action_mask, self.config.aggregation))

    def advantages(self, episode: Experience) -> Experience:
        """Return rows with advantages of penalized scores, times importance weights, and a mask without dropped tokens.

        The weights are multiplied into the advantages, since every loss is proportional to them.
        """
        metrics: dict[str, float] = {}
        view = self._with_length_penalty(EpisodeView.of(episode), metrics)
        kl = self._measure_kl(episode, view, metrics)
        in_reward = kl if self.config.kl_in == "reward" else None
        coefficient = self.kl_coef if episode.kl_coef is None else episode.kl_coef
        turns = self.turn_scores(episode, view)
        rewards = token_rewards(view.local(view.scores), in_reward, coefficient, episode.action_mask, turns)
        rows = self.estimate(episode, view, rewards, kl, metrics)
        assert rows.advantages is not None
        mask, advantages = episode.action_mask, rows.advantages
        if self._entropy is not None:
            self._measure_entropy(self._entropy, episode, view, metrics)
        if self.config.corrects_off_policy:
            weights, mask = importance_weights(self.config, episode, view, metrics)
            advantages = advantages * weights
        if self.config.mask_truncated:
            mask = mask & ~episode.truncated.unsqueeze(-1)
        rows = replace(rows, advantages=advantages, action_mask=mask, metrics=metrics)
        return with_marks(rows, self.functions["policy_loss"], view)

    @property
    def kl_coef(self) -> float:
        """Factor of the KL in the reward, for samples without a coefficient from their maker."""
        return self.config.kl_coef

    def turn_scores(self, episode: Experience, view: EpisodeView) -> Tensor | None:
        """[R, A] part of the scores that was earned at certain tokens, or None if all is earned at the end.

        The default is the part that turns of an environment earned, if the estimator credits turns.
        """
        return earned_in_turns(episode, view) if credits_turns(self.estimator) and has_turns(episode) else None

    def estimate(
        self, episode: Experience, view: EpisodeView, rewards: Tensor, kl: Tensor | None, metrics: dict[str, float]
    ) -> Experience:
        """Return the rows with advantages from `rewards` [R, A]. Warns if answers do not differ for long. Collective.

        A subclass may override it, and add to `metrics`.
        """
        assert self.estimator is not None
        penalises_kl = kl is not None and self.config.kl_in == "reward"
        advantages = estimated(self.estimator, episode, view, rewards=rewards, kl=kl, penalises_kl=penalises_kl)
        self._flat_groups.see(view, advantages, penalises_kl=penalises_kl)
        return replace(episode, advantages=advantages)

    def _with_length_penalty(self, view: EpisodeView, metrics: dict[str, float]) -> EpisodeView:
        """Return the view with the (negative) penalty of long answers added to the scores, and to the rewards."""
        buffer, longest = self.config.overlong_buffer_tokens, self._max_new_tokens
        if buffer is None:
            return view
        assert longest is not None
        lengths = sums_of_samples(view.lengths, view.row_sample_ids)
        penalty = self.config.overlong_penalty * overlong_penalty(lengths, max_tokens=longest, buffer_tokens=buffer)
        metrics["reward/overlong_penalty"] = float(penalty.mean())
        return replace(view, scores=view.scores + penalty, rewards={**view.rewards, LENGTH_PENALTY: penalty})

    def _measure_kl(self, episode: Experience, view: EpisodeView, metrics: dict[str, float]) -> Tensor | None:
        """[R, A] KL of the sampling policy to the reference, or None without a reference. Adds means to `metrics`."""
        if episode.reference_log_probs is None:
            return None
        kl: Tensor = self._kl(episode.action_log_probs, episode.reference_log_probs)
        total, mean = sum_and_mean_over_ranks(kl, episode.action_mask, view.all_reduce)
        metrics["kl/mean"] = float(mean)
        metrics["kl/per_sample"] = float(total) / view.num_samples
        return kl

    def _measure_entropy(
        self, controller: EntropyController, episode: Experience, view: EpisodeView, metrics: dict[str, float]
    ) -> None:
        """Add the entropy of the sampling policy and the current coefficient to `metrics`.

        The entropy is estimated as the mean of -log p over the sampled tokens of all ranks. The controller also
        receives it, to adapt the coefficient.
        """
        entropy = -float(mean_over_ranks(episode.action_log_probs, episode.action_mask, view.all_reduce))
        controller.measure(entropy)
        metrics["policy/sampled_entropy"] = entropy
        metrics["policy/entropy_coef"] = controller.value

    def end_episode(self) -> None:
        """Adapt the entropy coefficient after training on an episode."""
        if self._entropy is not None:
            self._entropy.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the adapted entropy coefficient. Empty if it does not adapt."""
        return {} if self._entropy is None else {"entropy_coef": self._entropy.coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. A state without an entropy coefficient changes nothing."""
        if self._entropy is not None and "entropy_coef" in state:
            self._entropy.coefficient = float(state["entropy_coef"])

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        terms = self.terms_of(models["policy"], batch)
        return LossOutput(terms.sums, terms.metrics, terms.output.log_probs.detach())

    def terms_of(self, policy: nn.Module, batch: Experience) -> PolicyTerms:
        """Run the policy on a micro-batch, and return the sums of `policy_terms`."""
        assert batch.advantages is not None
        mask, terms = batch.action_mask, self.policy_terms()
        learns_entropy = self._entropy_coef > 0
        output = policy_forward(policy, batch, self.temperature, with_entropy=True, entropy_grad=learns_entropy)
        assert output.entropy is not None
        # With importance weights for the engine, the ratio is relative to the trainer's own log-probs.
        old = batch.action_log_probs if batch.trainer_log_probs is None else batch.trainer_log_probs
        loss_input = PolicyLossInput(output.log_probs, old, batch.advantages, mask, batch.columns.get(MARKS))
        loss = self.functions["policy_loss"](loss_input)
        if not isinstance(loss, PolicyLoss):
            raise TypeError(f"the policy loss returned a {type(loss).__name__}, not a PolicyLoss")
        sums = {"policy": self._sum(loss.losses, mask)}
        if "entropy" in terms:
            sums["entropy"] = self._sum(output.entropy, mask)
        if "kl" in terms:
            assert batch.reference_log_probs is not None
            kl = self._kl(output.log_probs, batch.reference_log_probs)
            if self.config.kl_ratio:
                kl = kl * importance_ratio(output.log_probs, old, mask)
            sums["kl"] = self._sum(kl, mask)
        return PolicyTerms(sums, policy_metrics(loss, output, old, mask), output, loss)

    def _sum(self, values: Tensor, mask: Tensor) -> Tensor:
        return aggregate_sum(values, mask, self.config.aggregation, self._norm_length)
