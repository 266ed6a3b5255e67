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
    """[..., K] log-probs of the same K tokens -> [...] float32 nats, with the policy's gradient.

    `reverse-kl` is KL(P || T) and `forward-kl` KL(T || P), of the policy P and the teacher T. `jsd`, with the weight w,
    is w KL(T || M) + (1 - w) KL(P || M) for M = w T + (1 - w) P (Agarwal 2023, equation 1): close to w = 0 it is w
    times forward-kl, close to 1 it is 1 - w times reverse-kl.
    """
    ours, its = with_rest(policy), with_rest(teacher.detach())
    if kind == "reverse-kl":
        return _kl(ours, its).float()
    if kind == "forward-kl":
        return _kl(its, ours).float()
    if kind == "jsd":
        mixture = torch.logaddexp(its + math.log(jsd_weight), ours + math.log1p(-jsd_weight))
        return (jsd_weight * _kl(its, mixture) + (1.0 - jsd_weight) * _kl(ours, mixture)).float()
    raise ValueError(f"unknown divergence {kind!r}: reverse-kl, forward-kl or jsd")


def with_rest(log_probs: Tensor) -> Tensor:
    """[..., K] -> [..., K + 1] float64: the log-prob of all other tokens together comes last.

    float32 would know 1 - sum to about 1e-7 only, which is 1% of a rest of 1e-5.
    """
    log_probs = log_probs.double()
    kept = log_probs.logsumexp(-1, keepdim=True).clamp(max=math.log1p(-LEAST_REST))
    return torch.cat([log_probs, torch.log(-torch.expm1(kept))], dim=-1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)
