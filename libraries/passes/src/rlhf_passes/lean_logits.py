"""Log-probs and entropy from logits, with one tensor of their size in memory: the logits, then their gradient.

torch's own operations hold four. For outputs too small for a head without logits (`lean_head.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_forward.logprobs import LEAST_LOGIT, Temperature, rows_of, scaled_logits

from .fast_linear import is_plain

MIN_LOGITS = 1 << 20
"""For smaller outputs (4 MB) more calls do not pay."""
CHUNK_LOGITS = 1 << 20
"""Logits of which there are further copies at a time."""


def can_reuse(logits: Tensor) -> bool:
    """Whether `lean_log_probs` takes these [N, V]: float32 on a CPU, and enough to pay."""
    return is_plain(logits) and logits.dim() == 2 and logits.numel() >= MIN_LOGITS


def lean_log_probs(
    logits: Tensor, labels: Tensor, temperature: Temperature, *, with_entropy: bool, entropy_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """`token_log_probs` and `entropy` of logits [N, V] that nobody else reads: the backward pass overwrites them.

    labels: [N] int64. Returns [N] each, nats. Without `entropy_grad` the entropy has no gradient.
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
            # d log p_label = onehot - p;  d entropy = -p (log p + entropy)
            slope = log_prob_grads[chunk, None]
            if ctx.entropy_grad:
                slope = slope + (rows.clamp(min=LEAST_LOGIT) + entropies[chunk, None]) * entropy_grads[chunk, None]
            rows.exp_().mul_(-slope)
            rows.scatter_add_(-1, labels[chunk, None], log_prob_grads[chunk, None]).div_(of_rows)
        return logits, None, None, None, None
