"""Scores less the penalty of long answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.policy_objective import PolicyObjectiveSection
from ..errors import ConfigError
from ..functional import overlong_penalty, sums_of_samples
from ..whole import EpisodeScalars

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShapedScores:
    """Scores of all rows of an episode, with the penalty of long answers."""

    scores: Tensor
    """[B] float32."""
    penalty: Tensor | None
    """[B] float32, at most 0; None where it is off."""
    metrics: dict[str, float]


def shaped_scores(config: PolicyObjectiveSection, episode: EpisodeScalars, longest: int | None) -> ShapedScores:
    """longest: most tokens of an answer, checked by `check_overlong`."""
    if config.overlong_buffer_tokens is None:
        return ShapedScores(episode.scores, None, {})
    assert longest is not None
    lengths = sums_of_samples(episode.lengths, episode.row_sample_ids)
    penalty = config.overlong_penalty * overlong_penalty(
        lengths, max_tokens=longest, buffer_tokens=config.overlong_buffer_tokens
    )
    return ShapedScores(episode.scores + penalty, penalty, {"reward/overlong_penalty": float(penalty.mean())})


def check_overlong(config: PolicyObjectiveSection, longest: int | None) -> None:
    """Raise `ConfigError` for a buffer longer than the longest answer."""
    buffer = config.overlong_buffer_tokens
    if buffer is not None and (longest is None or buffer > longest):
        known = f"the longest answer ({longest} tokens)" if longest is not None else "an answer of unknown length"
        raise ConfigError(
            f"is {buffer}, more than {known}",
            where="algorithm.overlong_buffer_tokens",
            hint=f"at most engine.max_new_tokens{f' = {longest}' if longest else ''}; DAPO took a fifth of it",
        )
