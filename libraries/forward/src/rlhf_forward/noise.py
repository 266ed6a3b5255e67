"""Sampling noise that depends on (seed, sample, token) alone, and tokens drawn with it.

Philox4x32-10 (Salmon 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a counter into random bits without
any state: the same sample gets the same noise in any batch, process or order, before and after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.errors import DivergenceError

from .logprobs import Temperature, scaled_logits, token_log_probs

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_FIRST_NUCLEUS_GUESS = 64
_BLOCK = 128


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit words, in int64 without overflow (by 16-bit halves)."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four 32-bit words out of four; int64 tensors that broadcast, values in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniforms(seed: int, sample_ids: Tensor, token_indices: Tensor) -> Tensor:
    """One uniform number in the open interval (0, 1) for each (sample, token).

    seed: its low 64 bits count; sample_ids, token_indices: int64, broadcast together. Returns float64 of the
    broadcast shape, 52 random bits each. Drawing many tokens in one call costs hardly more than drawing one:
    `uniforms(seed, ids[:, None], torch.arange(n))`.
    """
    first, second, _, _ = philox4x32(
        (sample_ids & _WORD, (sample_ids >> 32) & _WORD, token_indices & _WORD, (token_indices >> 32) & _WORD),
        (seed & _WORD, (seed >> 32) & _WORD),
    )
    bits = ((first >> 6) << 26) | (second >> 6)
    # Adding a half excludes both ends; with 52 bits the sum is exact.
    return (bits.double() + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row."""

    token_ids: Tensor
    """[B] int64."""
    log_probs: Tensor
    """[B] float32 nats, of the distribution sampled from: after temperature, top-k and top-p."""
    support_ids: Tensor | None
    """[B, K] int32: kept token ids in ascending order, -1 = padding; None when nothing was truncated."""


def inverse_cdf_sample(
    logits: Tensor, uniforms: Tensor, temperature: Temperature = 1.0, top_k: int = 0, top_p: float = 1.0
) -> SampledTokens:
    """The token at which each row's cumulative distribution, in order of token ids, passes its uniform number.

    logits: [B, V]; uniforms: [B] float64 in (0, 1); temperature > 0, or [B, 1]; top_k: 0 = off; top_p: 1 = off, taken
    of what top-k kept. Tokens tied with the last kept one are kept too, so the support depends on the row alone. A
    token of probability zero is never drawn. Raises `DivergenceError` where a row's logits are no distribution.
    """
    weights = scaled_logits(logits, temperature).softmax(-1)
    vocabulary = weights.shape[-1]
    truncates = 0 < top_k < vocabulary or top_p < 1.0
    if 0 < top_k < vocabulary:
        smallest = weights.topk(top_k, dim=-1).values[:, -1:]
        weights = torch.where(weights >= smallest, weights, 0.0)
    if top_p < 1.0:
        weights = torch.where(weights >= _nucleus_threshold(weights, top_p), weights, 0.0)
    token_ids, total = _draw(weights, uniforms)
    if not bool(torch.isfinite(total).all()):
        raise DivergenceError(
            "the policy's logits are not finite, so no token can be drawn",
            where="sampling",
            hint="lower optimizer.lr or train in a wider precision",
        )
    chosen = weights.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return SampledTokens(token_ids, (chosen / total).log().float(), _support(weights) if truncates else None)


def greedy_sample(logits: Tensor) -> SampledTokens:
    """The most likely token of each row, [B, V] -> [B]; log-probs of the untruncated distribution at temperature 1."""
    token_ids = logits.argmax(-1)
    return SampledTokens(token_ids, token_log_probs(logits, token_ids), None)


def _draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """[B, V] weights >= 0 and [B] uniforms -> [B] token ids, and [B] float64 the sum of each row's weights.

    Finds the block in which the cumulative sum passes its threshold, then the token in it: a float64 cumulative sum
    over a whole vocabulary takes ten times as long.
    """
    blocks = _blocks(weights)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    total = ends[:, -1]
    block, rest = _first_above(ends, sums, uniforms * total)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block].double()
    token, _ = _first_above(inside.cumsum(-1), inside, rest)
    return block * _BLOCK + token, total


def _blocks(weights: Tensor) -> Tensor:
    """[B, V] -> [B, ceil(V / block), block]. Sums go through blocks so that they add in one order in any batch."""
    if padding := -weights.shape[-1] % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, padding))
    return weights.reshape(weights.shape[0], -1, _BLOCK)


def _first_above(ends: Tensor, weights: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry of positive weight whose cumulative end is above the threshold, and how far in that is.

    There always is one, whatever rounding does: the threshold is held below the largest such end.
    """
    ends = torch.where(weights > 0, ends, 0.0)
    highest = ends.amax(-1)
    threshold = torch.minimum(threshold, highest.nextafter(torch.zeros_like(highest)))
    index = (ends > threshold.unsqueeze(-1)).int().argmax(-1, keepdim=True)
    return index.squeeze(-1), threshold - (ends - weights).gather(-1, index).squeeze(-1)


def _nucleus_threshold(weights: Tensor, top_p: float) -> Tensor:
    """[B, 1]: the weight of the last token of the smallest set of likeliest tokens that holds `top_p` of the sum.

    Sorting a whole vocabulary costs many times a draw, and a nucleus is mostly small: the likeliest few are tried
    first, and more only where they do not suffice. The result does not depend on how many were tried.
    """
    vocabulary = weights.shape[-1]
    target = top_p * _blocks(weights).sum(-1, dtype=torch.float64).cumsum(-1)[:, -1:]
    threshold = weights.new_zeros(weights.shape[0], 1)
    rows = torch.arange(weights.shape[0], device=weights.device)
    looked_at = min(_FIRST_NUCLEUS_GUESS, vocabulary)
    while rows.numel():
        largest = weights.topk(looked_at, dim=-1).values
        reached = largest.cumsum(-1, dtype=torch.float64) >= target
        # Rounding may leave a row just below its target with all tokens counted: then all are kept.
        found = reached[:, -1] if looked_at < vocabulary else torch.ones_like(reached[:, -1])
        last = torch.where(reached.any(-1, keepdim=True), reached.int().argmax(-1, keepdim=True), looked_at - 1)
        threshold[rows[found]] = largest.gather(-1, last)[found]
        # Only rows with a wider nucleus are looked at again.
        rows, weights, target = rows[~found], weights[~found], target[~found]
        looked_at = min(8 * looked_at, vocabulary)
    return threshold


def _support(weights: Tensor) -> Tensor:
    """[B, V] with zeros on truncated tokens -> [B, K] int32 ids of the rest, ascending, padded with -1."""
    is_kept = weights > 0
    counts = is_kept.sum(-1)
    rows, ids = is_kept.nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    columns = torch.arange(ids.numel(), device=ids.device) - starts[rows]
    support = torch.full((weights.shape[0], int(counts.max())), -1, dtype=torch.int32, device=weights.device)
    support[rows, columns] = ids.int()
    return support
