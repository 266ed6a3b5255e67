"""Divergences of the policy's distribution from the teacher's, over the teacher's K most likely tokens and the rest.

The rest counts as one event, so both are full distributions. By the data processing inequality their divergence is at
most that over the whole vocabulary. They are equal if K is the size of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

LEAST_REST = 1e-6
"""Lower bound on the probability of the rest, since at 0 its logarithm and the policy's gradient would be infinite."""
_LEAST_LOG_PROB = -1e4
"""Log-prob of a token that a structure or a banned word excludes, for policy and teacher. Its probability is 0."""


def divergence(
    policy: Tensor, teacher: Tensor, kind: Literal["reverse-kl", "forward-kl", "jsd"], *, jsd_weight: float = 0.5
) -> Tensor:
    """Compute the divergence between the distributions of policy P and teacher T. Differentiable in `policy`.

    Args:
        policy: [..., K + 1] log-probs of K tokens and of the rest, in nats (see `with_rest`).
        teacher: [..., K + 1] log-probs of the same tokens and of the rest.
        kind: `reverse-kl` is KL(P || T), `forward-kl` KL(T || P), and `jsd` is w KL(T || M) + (1 - w) KL(P || M)
            with M = w T + (1 - w) P (Agarwal 2023, equation 1). For w near 0, jsd is w times forward-kl. For w near
            1, it is 1 - w times reverse-kl.
        jsd_weight: Weight w of the teacher in `jsd`, in (0, 1).

    Returns:
        [...] float32, in nats.

    Raises:
        ValueError: `kind` is unknown.

    Example:
        >>> import torch
        >>> policy, teacher = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
        >>> round(divergence(policy, teacher, "reverse-kl").item(), 4)
        0.1438
    """
    p, t = policy.double(), teacher.detach().double()
    if kind == "reverse-kl":
        return _kl(p, t).float()
    if kind == "forward-kl":
        return _kl(t, p).float()
    if kind == "jsd":
        mixture = torch.logaddexp(t + math.log(jsd_weight), p + math.log1p(-jsd_weight))
        return (jsd_weight * _kl(t, mixture) + (1.0 - jsd_weight) * _kl(p, mixture)).float()
    raise ValueError(f"unknown divergence {kind!r}, expected reverse-kl, forward-kl or jsd")


def with_rest(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the log-probs of K tokens and of all other tokens together.

    The rest is summed from the logits of its tokens. 1 - sum of the K probabilities would be inaccurate: float32
    log-probs determine the sum to about 1e-7, which is 1% of a rest of 1e-5.

    Args:
        logits: [..., V] float32.
        ids: [..., K] int64, distinct.

    Returns:
        [..., K + 1] float32 nats. The rest has at least the probability `LEAST_REST`.

    Example:
        >>> import torch
        >>> with_rest(torch.zeros(4), torch.tensor([2])).exp()
        tensor([0.2500, 0.7500])
    """
    normalizer = logits.logsumexp(-1, keepdim=True)
    least = math.log(LEAST_REST)
    known = (logits.gather(-1, ids) - normalizer).clamp(min=_LEAST_LOG_PROB)
    if ids.shape[-1] == logits.shape[-1]:
        return torch.cat([known, torch.full_like(normalizer, least)], dim=-1)
    rest = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) - normalizer
    return torch.cat([known, rest.clamp(min=least)], dim=-1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)
