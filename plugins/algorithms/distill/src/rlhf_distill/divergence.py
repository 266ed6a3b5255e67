"""Divergences of the policy's distribution from the teacher's, over the teacher's likeliest tokens and the rest.

The rest is one event of its own, so both are whole distributions. By the data processing inequality their divergence
is at most that over the whole vocabulary, and with K the whole vocabulary it is that.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

LEAST_REST = 1e-6
"""Least probability of the rest: at 0 its logarithm, and the policy's gradient towards it, would be infinite."""


def divergence(
    policy: Tensor, teacher: Tensor, kind: Literal["reverse-kl", "forward-kl", "jsd"], *, jsd_weight: float = 0.5
) -> Tensor:
    """[..., K + 1] log-probs of the same K tokens and of the rest (`with_rest`) -> [...] float32 nats.

    The policy's gradient passes through it.

    `reverse-kl` is KL(P || T) and `forward-kl` KL(T || P), of the policy P and the teacher T. `jsd`, with the weight w,
    is w KL(T || M) + (1 - w) KL(P || M) for M = w T + (1 - w) P (Agarwal 2023, equation 1): close to w = 0 it is w
    times forward-kl, close to 1 it is 1 - w times reverse-kl.
    """
    ours, its = policy.double(), teacher.detach().double()
    if kind == "reverse-kl":
        return _kl(ours, its).float()
    if kind == "forward-kl":
        return _kl(its, ours).float()
    if kind == "jsd":
        mixture = torch.logaddexp(its + math.log(jsd_weight), ours + math.log1p(-jsd_weight))
        return (jsd_weight * _kl(its, mixture) + (1.0 - jsd_weight) * _kl(ours, mixture)).float()
    raise ValueError(f"unknown divergence {kind!r}: reverse-kl, forward-kl or jsd")


def with_rest(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of K tokens, then that of all other tokens together, from logits.

    The rest is summed from the logits of its tokens. 1 - sum would lose it: float32 log-probs know their sum to about
    1e-7 only, which is 1% of a rest of 1e-5.

    Args:
        logits: [..., V] float32.
        ids: [..., K] int64, distinct.

    Returns:
        [..., K + 1] float32 nats. The rest has at least the probability `LEAST_REST`.
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    known, least = logits.gather(-1, ids) - normaliser, math.log(LEAST_REST)
    if ids.shape[-1] == logits.shape[-1]:
        return torch.cat([known, torch.full_like(normaliser, least)], dim=-1)
    rest = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) - normaliser
    return torch.cat([known, rest.clamp(min=least)], dim=-1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)
