"""The common algorithm of the family: a selected advantage estimator and policy loss, a KL penalty, and no critic."""

from __future__ import annotations

from torch import Tensor

from rlhf_core.components import AlgorithmContext
from rlhf_core.episode_view import EpisodeView
from rlhf_core.errors import ConfigError
from rlhf_core.types import Experience, RolloutGroup
from rlhf_objective import PolicyObjective, check_groups, group_spread

from .config import CriticFreeConfig


def build(config: CriticFreeConfig, context: AlgorithmContext) -> CriticFree:
    """Build the algorithm. Raise `ConfigError` if it compares groups and `samples_per_prompt` is 1."""
    algorithm = CriticFree(config, context)
    check_groups(config.algorithm, algorithm.estimator, context.samples_per_prompt)
    return algorithm


class CriticFree(PolicyObjective):
    """Learns from sampled answers, with a baseline computed from the episode itself."""

    config: CriticFreeConfig

    def __init__(self, config: CriticFreeConfig, context: AlgorithmContext) -> None:
        if config.dynamic_sampling and context.samples_per_prompt < 2:
            raise ConfigError(
                "rejects every group whose scores are all equal, as in a group of one answer: no batch would ever fill",
                where="algorithm.dynamic_sampling",
                hint="set train.samples_per_prompt to 4 or more, or dynamic_sampling to false",
            )
        sampling = context.sampling
        super().__init__(config, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)
        self._score = context.score

    def keep(self, group: RolloutGroup) -> bool:
        """With dynamic sampling, keep only groups whose samples differ in score, ignoring length penalties."""
        if not self.config.dynamic_sampling:
            return True
        return len({self._score(item.rewards) for item in group.items}) > 1

    def estimate(
        self, episode: Experience, view: EpisodeView, rewards: Tensor, kl: Tensor | None, metrics: dict[str, float]
    ) -> Experience:
        spread = group_spread(view.scores, view.group_ids, view.row_sample_ids)
        metrics["group/std_mean"] = spread.std_mean
        metrics["group/without_spread_fraction"] = spread.without_spread_fraction
        return super().estimate(episode, view, rewards, kl, metrics)
