"""The algorithm behind the whole family: named advantages, a named policy loss, a KL penalty, and no critic."""

from __future__ import annotations

from rlhf_core.algorithm import EpisodeOutput
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import ConfigError
from rlhf_core.types import Experience, RolloutGroup
from rlhf_core.whole import whole_of
from rlhf_objective import PolicyObjective, check_groups, group_spread, token_rewards

from .config import CriticFreeConfig


def build(config: CriticFreeConfig, context: AlgorithmContext) -> CriticFree:
    """The algorithm under its options. Raises `ConfigError` where groups of one are to be compared."""
    made = CriticFree(config, context)
    check_groups(config.algorithm, made.estimator, context.samples_per_prompt)
    return made


class CriticFree(PolicyObjective):
    """Learns from sampled answers with a baseline computed from the episode itself."""

    config: CriticFreeConfig

    def __init__(self, config: CriticFreeConfig, context: AlgorithmContext) -> None:
        if config.dynamic_sampling and context.samples_per_prompt < 2:
            raise ConfigError(
                "refuses every group without spread in its scores, and a group of one has none: no batch would ever "
                "fill",
                where="algorithm.dynamic_sampling",
                hint="set train.samples_per_prompt to 4 or more, or turn dynamic_sampling off",
            )
        sampling = context.sampling
        super().__init__(config, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)
        self._score = context.score

    def keep(self, group: RolloutGroup) -> bool:
        """With dynamic sampling, keep only groups whose samples differ in score, length penalties aside."""
        if not self.config.dynamic_sampling:
            return True
        return len({self._score(item.rewards) for item in group.items}) > 1

    def advantages(self, episode: Experience) -> EpisodeOutput:
        """Advantages from scores, length penalty and KL, times importance weights; masks tokens that must not count."""
        whole = whole_of(episode)
        shaped = self.shaped(whole.scalars)
        spread = group_spread(shaped.scores, whole.scalars.group_ids, whole.scalars.row_sample_ids)
        metrics = {
            **shaped.metrics,
            "group/std_mean": spread.std_mean,
            "group/without_spread_fraction": spread.without_spread_fraction,
        }
        kl = self.kl(episode, whole, metrics)
        in_reward = kl if self.config.kl_in == "reward" else None
        coefficient = self.config.kl_coef if episode.kl_coef is None else episode.kl_coef
        rewards = token_rewards(whole.here(shaped.scores), in_reward, coefficient, episode.action_mask)
        advantages = self.estimate(episode, whole, shaped, rewards, kl)
        return EpisodeOutput(self.corrected(episode, advantages, whole, metrics), metrics)
