"""`repetition-penalty`: penalises repeated n-grams in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def repetition_penalty(rollouts: Sequence[Any], *, ngram_tokens: int = 4, max_penalty: float = 1.0) -> list[float]:
    """Minus `max_penalty` times the share of the answer's token n-grams that occurred in it before.

    0 where no n-gram comes twice and where the answer is shorter than one; the share of repeated n-grams as in
    Yeo et al. 2025 (Demystifying long chain-of-thought reasoning), on tokens so that it fits every language.
    """
    if ngram_tokens < 1 or max_penalty < 0:
        raise ValueError(f"ngram_tokens must be >= 1 and max_penalty >= 0, got {ngram_tokens} and {max_penalty}")
    return [-max_penalty * repeated_share(rollout.sampled_ids, ngram_tokens) for rollout in rollouts]


def repeated_share(ids: Sequence[int], size: int) -> float:
    """Share in [0, 1) of the n-grams of `ids` that are not the first of their kind."""
    ngrams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
