"""`keyword-coverage`: a reward that is built once, with checked options."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.components import RewardContext
from rlhf_core.types import Rollout

from .config import KeywordCoverageConfig


class KeywordCoverage:
    """Called with rollouts, like a function."""

    def __init__(self, config: KeywordCoverageConfig) -> None:
        self._config = config

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [self._score(rollout) for rollout in rollouts]

    def _score(self, rollout: Rollout) -> float:
        words = [self._folded(str(word)) for word in rollout.metadata.get(self._config.metadata_key, ())]
        if not words:
            return self._config.without_keywords
        text = self._folded(rollout.completion)
        return sum(word in text for word in words) / len(words)

    def _folded(self, text: str) -> str:
        return text if self._config.case_sensitive else text.casefold()


def build(config: KeywordCoverageConfig, context: RewardContext) -> KeywordCoverage:
    """Create the reward. `context` has the device and the run's seed."""
    return KeywordCoverage(config)
