"""The algorithm behind the whole family: named advantages, a named policy loss, a KL penalty, and no critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rlhf_core.algorithm import (
    EpisodeOutput,
    GroupPass,
    LossOutput,
    LossTerm,
    Needs,
    PassContext,
    RolloutAlgorithm,
    needs_greedy_answer,
    needs_of,
)
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import ConfigError
from rlhf_core.types import Experience, Role, RolloutGroup
from rlhf_core.whole import whole_of
from rlhf_forward import model_passes
from rlhf_objective import FlatGroups, PolicyObjective, check_groups, estimated, group_spread, token_rewards

from .config import CriticFreeConfig


def build(config: CriticFreeConfig, context: AlgorithmContext) -> CriticFree:
    """The algorithm under its options. Raises `ConfigError` where groups of one are to be compared."""
    made = CriticFree(config, context)
    check_groups(config.algorithm, made.estimator, context.samples_per_prompt)
    return made


class CriticFree(RolloutAlgorithm):
    """Learns from sampled answers with a baseline computed from the episode itself."""

    columns = PolicyObjective.columns

    def __init__(self, config: CriticFreeConfig, context: AlgorithmContext) -> None:
        if config.dynamic_sampling and context.samples_per_prompt < 2:
            raise ConfigError(
                "refuses every group without spread in its scores, and a group of one has none: no batch would ever "
                "fill",
                where="algorithm.dynamic_sampling",
                hint="set train.samples_per_prompt to 4 or more, or turn dynamic_sampling off",
            )
        sampling = context.sampling
        self._config = config
        self._objective = PolicyObjective(
            config, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens
        )
        self.estimator = self._objective.functions["advantage"]
        """Turns what it needs of an episode into advantages, [B] or [B, A]."""
        self._score = context.score
        self._flat_groups = FlatGroups(self.estimator)

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy", "reference"} if self._objective.has_reference else {"policy"})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        return self._objective.terms()

    @property
    def needs_greedy_answer(self) -> bool:
        return needs_greedy_answer(self.estimator)

    @property
    def needs_trainer_log_probs(self) -> bool:
        return self._config.corrects_off_policy

    def policy_log_probs(self, policy: nn.Module, batch: Experience) -> Tensor:
        return self._objective.log_probs(policy, batch)

    def passes(self, context: PassContext) -> Sequence[GroupPass]:
        return model_passes(context, self.roles)

    def keep(self, group: RolloutGroup) -> bool:
        """With dynamic sampling, keep only groups whose samples differ in score, length penalties aside."""
        if not self._config.dynamic_sampling:
            return True
        return len({self._score(item.rewards) for item in group.items}) > 1

    @property
    def needs(self) -> Needs:
        return needs_of(self.estimator)

    def advantages(self, episode: Experience) -> EpisodeOutput:
        """Advantages from scores, length penalty and KL, times importance weights; masks tokens that must not count."""
        whole = whole_of(episode)
        shaped = self._objective.shaped(whole.scalars)
        spread = group_spread(shaped.scores, whole.scalars.group_ids, whole.scalars.row_sample_ids)
        metrics = {
            **shaped.metrics,
            "group/std_mean": spread.std_mean,
            "group/without_spread_fraction": spread.without_spread_fraction,
        }
        kl = self._objective.kl(episode, whole, metrics)
        in_reward = kl if self._config.kl_in == "reward" else None
        coefficient = self._objective.config.kl_coef if episode.kl_coef is None else episode.kl_coef
        advantages = estimated(
            self.estimator,
            episode,
            whole,
            rewards=token_rewards(whole.here(shaped.scores), in_reward, coefficient, episode.action_mask),
            shaped=shaped,
            kl=kl,
            penalises_kl=in_reward is not None,
        )
        self._flat_groups.see(whole.scalars, advantages, scores=shaped.scores, penalises_kl=in_reward is not None)
        return EpisodeOutput(self._objective.corrected(episode, advantages, whole, metrics), metrics)

    def set_option(self, name: str, value: float) -> None:
        """`kl_coef` can be changed where there is a reference."""
        if name != "kl_coef" or self._config.kl_coef == 0 or value == 0:
            super().set_option(name, value)
        self._objective.set_kl_coef(value)

    def end_episode(self) -> None:
        self._objective.end_episode()

    def state_dict(self) -> dict[str, Any]:
        return self._objective.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._objective.load_state_dict(state)

    def counts(self, batch: Experience) -> Mapping[str, float]:
        return dict.fromkeys(self.terms, self._objective.count(batch))

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        learnt = self._objective.terms_of(models["policy"], batch)
        return LossOutput(learnt.sums, learnt.metrics, learnt.output.log_probs.detach())
