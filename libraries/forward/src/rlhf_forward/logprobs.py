"""Log-probabilities and entropy of the distribution that tokens were sampled from, in nats and float32.

The distribution is softmax(logits / temperature), renormalized over the kept support if truncated sampling (top-k,
top-p) is on, so that policy, reference and engine are compared on the same distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_LOGIT = -1e30
"""Replaces a logit of -inf in the entropy, since 0 * -inf would be NaN."""


def response_logits(logits: Tensor, num_actions: int) -> Tensor:
    """Return the positions that predict the response tokens, one before each token: P - 1 up to S - 2.

    Counted from the end, the slice is the same for a whole sequence and for its last A + 1 positions.

    Args:
        logits: [B, S, V], or [B, A + 1, V] from a model run with `logits_to_keep = A + 1`. Values [B, S] work too.
        num_actions: Number of response tokens (A).

    Returns:
        A view of [B, A, V]. Position t predicts response token t.

    Raises:
        ValueError: There are fewer than A + 1 positions.

    Example:
        >>> response_logits(torch.arange(5)[None], num_actions=2)  # prompt 0, 1, 2 and response 3, 4
        tensor([[2, 3]])
    """
    positions = logits.shape[1]
    if positions < num_actions + 1:
        raise ValueError(f"{num_actions} response tokens need {num_actions + 1} positions, got {positions}")
    return logits[:, positions - num_actions - 1 : positions - 1]


Temperature = float | Tensor
"""One number for all positions, or [..., 1] for logits [..., V]."""


def scaled_logits(logits: Tensor, temperature: Temperature) -> Tensor:
    """Divide logits by the temperature, in float32."""
    is_one = not isinstance(temperature, Tensor) and temperature == 1.0
    return logits.float() if is_one else logits.float() / temperature


def rows_of(temperature: Temperature, rows: slice) -> Temperature:
    """Select the temperature of some rows of logits [N, V]."""
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _kept(scaled: Tensor, support_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the kept tokens [..., K], -inf on padding, and whether each row keeps the whole vocabulary [...].

    Rows with the whole vocabulary have zeros, which the caller replaces, so that no logsumexp or gradient is NaN.
    """
    is_kept = support_ids >= 0
    whole = ~is_kept.any(-1)
    gathered = scaled.gather(-1, support_ids.clamp(min=0).long())
    padded = torch.where(is_kept, gathered, -torch.inf)
    return torch.where(whole.unsqueeze(-1), 0.0, padded), whole


def token_log_probs(
    logits: Tensor, labels: Tensor, temperature: Temperature = 1.0, support_ids: Tensor | None = None
) -> Tensor:
    """Compute the log-probability of each label.

    Args:
        logits: [..., V] of any float dtype.
        labels: [...] int64.
        temperature: Divides the logits.
        support_ids: [..., K] int32, the kept tokens, -1 = padding. A row with only -1 keeps the whole vocabulary, and
            so does None.

    Returns:
        [...] float32 nats, -inf for a label outside its support.

    Example:
        >>> logits, label = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor(0)
        >>> token_log_probs(logits, label)  # log 0.5
        tensor(-0.6931)
        >>> token_log_probs(logits, label, support_ids=torch.tensor([0, 1]))  # log 0.5 / (0.5 + 0.25)
        tensor(-0.4055)
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
    """Compute the entropy of each position's distribution.

    Args:
        logits: [..., V] of any float dtype.
        temperature: Divides the logits.
        support_ids: [..., K] int32, as for `token_log_probs`.

    Returns:
        [...] float32 nats.

    Example:
        >>> entropy(torch.zeros(2, 4))  # uniform: log 4
        tensor([1.3863, 1.3863])
    """
    scaled = scaled_logits(logits, temperature)
    entropies = _entropy(scaled)
    if support_ids is None or support_ids.shape[-1] == 0:
        return entropies
    kept, whole = _kept(scaled, support_ids)
    return torch.where(whole, entropies, _entropy(kept))


def _entropy(scaled: Tensor) -> Tensor:
    finite = scaled.clamp(min=LEAST_LOGIT)
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * finite).sum(-1)
