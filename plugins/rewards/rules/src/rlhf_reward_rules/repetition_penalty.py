"""`repetition-penalty`: penalizes repeated n-grams in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def repetition_penalty(rollouts: Sequence[Any], *, ngram_tokens: int = 4, max_penalty: float = 1.0) -> list[float]:
    """Minus `max_penalty` times the share of the answer's token n-grams that occurred before in the answer.

    The share of repeated n-grams is that of Yeo et al. 2025 (Demystifying long chain-of-thought reasoning), here of
    tokens, so that it works in every language.

    Args:
        rollouts: samples to score.
        ngram_tokens: length of an n-gram in tokens. A shorter answer scores 0.
        max_penalty: factor of the share.

    Raises:
        ValueError: if `ngram_tokens` is below 1 or `max_penalty` negative.
    """
    if ngram_tokens < 1 or max_penalty < 0:
        raise ValueError(f"ngram_tokens must be >= 1 and max_penalty >= 0, got {ngram_tokens} and {max_penalty}")
    return [-max_penalty * repeated_share(rollout.sampled_ids, ngram_tokens) for rollout in rollouts]


def repeated_share(ids: Sequence[int], size: int) -> float:
    """Share in [0, 1) of the n-grams of `ids` that occurred before.

    Example:
        >>> repeated_share([1, 2, 1, 2, 1], size=2)
        0.5
    """
    ngrams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
