"""Log-probs and entropy from logits with a single tensor of their size in memory: the logits, then their gradient.

torch's own operations hold four. Used for outputs that are too small for a head without logits (`lean_head.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_forward.logprobs import LEAST_LOGIT, Temperature, rows_of, scaled_logits

from .fast_linear import is_plain

MIN_LOGITS = 1 << 20
"""Minimum number of logits. For smaller outputs (4 MB) the additional calls take more time than they save."""
CHUNK_LOGITS = 1 << 20
"""Number of logits that are copied at a time."""


def can_reuse(logits: Tensor) -> bool:
    """Whether `lean_log_probs` supports these [N, V] logits: float32 on a CPU, and enough to be worthwhile."""
    return is_plain(logits) and logits.dim() == 2 and logits.numel() >= MIN_LOGITS


def lean_log_probs(
    logits: Tensor, labels: Tensor, temperature: Temperature, *, with_entropy: bool, entropy_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `token_log_probs` and `entropy` of `logits`, which the backward pass overwrites with their gradient.

    Args:
        logits: [N, V] float32, not read by anything else.
        labels: [N] int64.
        temperature: a number, or [N, 1].
        with_entropy: whether to compute the entropy.
        entropy_grad: whether the entropy needs a gradient.

    Returns:
        [N] log-probs of the labels, in nats, and [N] entropies in nats or None.
    """
    log_probs, entropies = _FromLogits.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature, with_entropy, entropy_grad
    )
    if not with_entropy:
        return log_probs, None
    return log_probs, entropies if entropy_grad else entropies.detach()


def _chunks(logits: Tensor) -> list[slice]:
    size = max(1, CHUNK_LOGITS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: Temperature, with_entropy: bool, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        chosen, normalisers, means = (logits.new_zeros(len(logits)) for _ in range(3))
        for chunk in _chunks(logits):
            scaled = scaled_logits(logits[chunk], rows_of(temperature, chunk))
            chosen[chunk] = scaled.gather(-1, labels[chunk, None])[:, 0]
            normalisers[chunk] = scaled.logsumexp(-1)
            if with_entropy:
                means[chunk] = (scaled.softmax(-1) * scaled.clamp(min=LEAST_LOGIT)).sum(-1)
        entropies = normalisers - means
        ctx.save_for_backward(logits, labels, normalisers, entropies)
        ctx.temperature, ctx.entropy_grad = temperature, with_entropy and entropy_grad
        return chosen - normalisers, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_grads: Tensor, entropy_grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, normalisers, entropies = ctx.saved_tensors
        logits = logits.detach()
        for chunk in _chunks(logits):
            of_rows = rows_of(ctx.temperature, chunk)
            rows = logits[chunk].div_(of_rows).sub_(normalisers[chunk, None])
            # d log p_label = onehot - p, d entropy = -p (log p + entropy)
            slope = log_prob_grads[chunk, None]
            if ctx.entropy_grad:
                slope = slope + (rows.clamp(min=LEAST_LOGIT) + entropies[chunk, None]) * entropy_grads[chunk, None]
            rows.exp_().mul_(-slope)
            rows.scatter_add_(-1, labels[chunk, None], log_prob_grads[chunk, None]).div_(of_rows)
        return logits, None, None, None, None
