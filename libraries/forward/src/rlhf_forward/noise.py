"""Sampling noise that depends only on (seed, sample, token), and tokens drawn with it.

The noise comes from a counter without any state (`philox.py`), so a sample has the same noise in any batch, process or
order, before and after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.errors import DivergenceError

from .logprobs import Temperature, scaled_logits, token_log_probs
from .philox import WORD, philox4x32

_FIRST_NUCLEUS_GUESS = 64
_BLOCK = 128


def uniforms(seed: int, sample_ids: Tensor, token_indices: Tensor) -> Tensor:
    """Return a uniform number in the open interval (0, 1) for each (sample, token).

    Many tokens in one call cost hardly more than one.

    Args:
        seed: Seed of the run. Its low 64 bits are used.
        sample_ids, token_indices: int64 tensors that broadcast.

    Returns:
        float64 of the broadcast shape, with 52 random bits each.

    Example:
        >>> drawn = uniforms(7, torch.tensor([5, 6])[:, None], torch.arange(4))
        >>> drawn.shape, drawn[1, 2].equal(uniforms(7, torch.tensor(6), torch.tensor(2)))
        (torch.Size([2, 4]), True)
    """
    first, second, _, _ = philox4x32(
        (sample_ids & WORD, (sample_ids >> 32) & WORD, token_indices & WORD, (token_indices >> 32) & WORD),
        (seed & WORD, (seed >> 32) & WORD),
    )
    bits = ((first >> 6) << 26) | (second >> 6)
    # Adding a half excludes both ends. With 52 bits the sum is exact.
    return (bits.double() + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row."""

    token_ids: Tensor
    """[B] int64."""
    log_probs: Tensor
    """[B] float32 nats, under the distribution sampled from: after temperature, top-k and top-p."""
    support_ids: Tensor | None
    """[B, K] int32: kept token ids in ascending order, -1 = padding. None if sampling was not truncated."""


def inverse_cdf_sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Temperature = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SampledTokens:
    """Draw the token at which each row's cumulative distribution, in order of token ids, exceeds its uniform number.

    Tokens that tie with the last kept one are kept too, so the support depends only on the row. A token of probability
    zero is never drawn.

    Args:
        logits: [B, V] of any float dtype.
        uniforms: [B] float64 in (0, 1).
        temperature: > 0, one number or [B, 1].
        top_k: Number of most likely tokens to keep. 0 = off.
        top_p: Probability, among the tokens that min-p and top-k kept, of the smallest set of likely tokens to keep.
            1 = off.
        min_p: Fraction of the most likely token's probability that a token needs to be kept. 0 = off.

    Returns:
        Tokens with log-probs and support.

    Raises:
        DivergenceError: The logits of a row are not a distribution (NaN, +inf, or only -inf).

    Example:
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> inverse_cdf_sample(logits, torch.tensor([0.6])).token_ids  # 0.5 < 0.6 < 0.8
        tensor([1])
        >>> sampled = inverse_cdf_sample(logits, torch.tensor([0.6]), top_p=0.7)  # tokens 0 and 1: 0.625 and 0.375
        >>> sampled.token_ids, sampled.log_probs.exp(), sampled.support_ids
        (tensor([0]), tensor([0.6250]), tensor([[0, 1]], dtype=torch.int32))
    """
    weights = scaled_logits(logits, temperature).softmax(-1)
    vocabulary = weights.shape[-1]
    truncates = 0 < top_k < vocabulary or top_p < 1.0 or min_p > 0.0
    if min_p > 0.0:
        weights = torch.where(weights >= min_p * weights.amax(-1, keepdim=True), weights, 0.0)
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
    """Return the most likely token of each row, with log-probs under the untruncated distribution at temperature 1.

    Args:
        logits: [B, V] of any float dtype.
    """
    token_ids = logits.argmax(-1)
    return SampledTokens(token_ids, token_log_probs(logits, token_ids), None)


def _draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """[B, V] weights >= 0 and [B] uniforms -> [B] token ids, and [B] float64 the sum of each row's weights.

    Finds the block in which the cumulative sum exceeds its threshold, then the token in it. A float64 cumulative sum
    over the whole vocabulary takes ten times as long.
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
    """[B, V] -> [B, ceil(V / block), block]. Blocks make the order of summation the same in any batch."""
    if padding := -weights.shape[-1] % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, padding))
    return weights.reshape(weights.shape[0], -1, _BLOCK)


def _first_above(ends: Tensor, weights: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry of positive weight whose cumulative sum exceeds the threshold, and the rest of the threshold.

    It exists in spite of rounding, because the threshold is limited to less than the largest cumulative sum.
    """
    ends = torch.where(weights > 0, ends, 0.0)
    highest = ends.amax(-1)
    threshold = torch.minimum(threshold, highest.nextafter(torch.zeros_like(highest)))
    index = (ends > threshold.unsqueeze(-1)).int().argmax(-1, keepdim=True)
    return index.squeeze(-1), threshold - (ends - weights).gather(-1, index).squeeze(-1)


def _nucleus_threshold(weights: Tensor, top_p: float) -> Tensor:
    """[B, 1]: weight of the least likely token in the smallest set of likely tokens with `top_p` of the sum.

    Sorting a whole vocabulary costs many times a draw, and a nucleus is usually small. So the few most likely tokens
    are tried first, then more for rows that need them. The result does not depend on the number tried.
    """
    vocabulary = weights.shape[-1]
    target = top_p * _blocks(weights).sum(-1, dtype=torch.float64).cumsum(-1)[:, -1:]
    threshold = weights.new_zeros(weights.shape[0], 1)
    rows = torch.arange(weights.shape[0], device=weights.device)
    size = min(_FIRST_NUCLEUS_GUESS, vocabulary)
    while rows.numel():
        largest = weights.topk(size, dim=-1).values
        reached = largest.cumsum(-1, dtype=torch.float64) >= target
        # Rounding may leave a row just below its target with all tokens counted: then all are kept.
        done = reached[:, -1] if size < vocabulary else torch.ones_like(reached[:, -1])
        last = torch.where(reached.any(-1, keepdim=True), reached.int().argmax(-1, keepdim=True), size - 1)
        threshold[rows[done]] = largest.gather(-1, last)[done]
        # Only rows with a wider nucleus are tried again.
        rows, weights, target = rows[~done], weights[~done], target[~done]
        size = min(8 * size, vocabulary)
    return threshold


def _support(weights: Tensor) -> Tensor:
    """[B, V] with zeros on truncated tokens -> [B, K] int32 ids of the other tokens, ascending, padded with -1."""
    is_kept = weights > 0
    counts = is_kept.sum(-1)
    rows, ids = is_kept.nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    columns = torch.arange(ids.numel(), device=ids.device) - starts[rows]
    support = torch.full((weights.shape[0], int(counts.max())), -1, dtype=torch.int32, device=weights.device)
    support[rows, columns] = ids.int()
    return support
