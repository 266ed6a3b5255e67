"""Log-probabilities and entropy of the distribution that tokens were actually sampled from.

In nats and float32. The distribution is softmax(logits / temperature), renormalised over the kept support where
truncated sampling (top-k, top-p) was on: policy, reference and engine are compared on the same distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_LOGIT = -1e30
"""Replaces a logit of -inf in the entropy, where 0 * -inf would be NaN."""


def response_logits(logits: Tensor, num_actions: int) -> Tensor:
    """[B, S, V], or [B, A+1, V] from a model run with `logits_to_keep = A + 1` -> [B, A, V].

    Row t predicts response token t: it is read at the state before that token, position P + t - 1. Counted from the
    end, the slice is the same for a whole sequence and for its last A + 1 positions. Values per position, [B, S], are
    read in the same way.
    """
    positions = logits.shape[1]
    if positions < num_actions + 1:
        raise ValueError(f"{num_actions} response tokens need {num_actions + 1} positions, got {positions}")
    return logits[:, positions - num_actions - 1 : positions - 1]


Temperature = float | Tensor
"""One for all positions, or [..., 1] for logits [..., V]."""


def scaled_logits(logits: Tensor, temperature: Temperature) -> Tensor:
    """The logits divided by the temperature, float32."""
    is_one = not isinstance(temperature, Tensor) and temperature == 1.0
    return logits.float() if is_one else logits.float() / temperature


def rows_of(temperature: Temperature, rows: slice) -> Temperature:
    """The temperature of some rows of logits [N, V]."""
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _kept(scaled: Tensor, support_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the kept tokens [..., K], -inf on padding, and which rows keep the whole vocabulary [...].

    Those rows get zeros, so that neither their logsumexp nor its gradient is NaN; the caller replaces them.
    """
    is_kept = support_ids >= 0
    whole = ~is_kept.any(-1)
    gathered = scaled.gather(-1, support_ids.clamp(min=0).long())
    padded = torch.where(is_kept, gathered, -torch.inf)
    return torch.where(whole.unsqueeze(-1), 0.0, padded), whole


def token_log_probs(
    logits: Tensor, labels: Tensor, temperature: Temperature = 1.0, support_ids: Tensor | None = None
) -> Tensor:
    """Log-probability of each label.

    logits: [..., V] of any float dtype; labels: [...] int64; support_ids: [..., K] int32, -1 = padding, a row all
    -1 = whole vocabulary. Returns [...] float32; -inf for a label outside its support.
    """
    scaled = scaled_logits(logits, temperature)
    chosen = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    log_probs = chosen - scaled.logsumexp(-1)
    if support_ids is None or support_ids.shape[-1] == 0:
        return log_probs
    kept, whole = _kept(scaled, support_ids)
    is_inside = (support_ids == labels.unsqueeze(-1)).any(-1)
    truncated = torch.where(is_inside, chosen - kept.logsumexp(-1), -torch.inf)
    return torch.where(whole, log_probs, truncated)


def entropy(logits: Tensor, temperature: Temperature = 1.0, support_ids: Tensor | None = None) -> Tensor:
    """Entropy of each position's distribution in nats: [..., V] -> [...] float32. Support as above."""
    scaled = scaled_logits(logits, temperature)
    entropies = _entropy(scaled)
    if support_ids is None or support_ids.shape[-1] == 0:
        return entropies
    kept, whole = _kept(scaled, support_ids)
    return torch.where(whole, entropies, _entropy(kept))


def _entropy(scaled: Tensor) -> Tensor:
    finite = scaled.clamp(min=LEAST_LOGIT)
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * finite).sum(-1)
