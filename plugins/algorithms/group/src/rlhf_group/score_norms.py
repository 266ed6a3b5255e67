"""Squared norms of the score of each sampled token, with respect to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import rlhf_forward  # loads torch only when it computes, not when options are read
from rlhf_core import Column
from rlhf_core.algorithm import GroupPass, PassContext

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_core.types import Experience, RolloutGroup

SCORE_NORM = "score_norm"
"""Column [A]: 1 - 2 p(token) + the sum of p^2 over the vocabulary. p is the distribution that was sampled from."""


class ScoreNormPass(GroupPass):
    """Adds `score_norm`, from a forward pass of the policy that sampled."""

    columns = {SCORE_NORM: Column()}  # noqa: RUF012 - core only reads it

    def __init__(self, context: PassContext) -> None:
        self._context = context

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        def norms(model: nn.Module, batch: Experience) -> Tensor:
            mask = batch.action_mask
            labels = batch.sequences[:, batch.prompt_length :][mask]
            support = None if batch.support_ids is None else batch.support_ids[mask]

            def read(logits: Tensor) -> Tensor:
                return squared_score_norm(logits, labels, support)

            found = rlhf_forward.policy_forward(model, batch, self._context.temperature, read=read).read
            assert found is not None
            return found

        return [{SCORE_NORM: row} for row in self._context.forward("policy", groups, norms)]


def squared_score_norm(logits: Tensor, labels: Tensor, support_ids: Tensor | None = None) -> Tensor:
    """Compute |d log p(label) / d logits|^2 = (1 - p(label))^2 + the sum of p^2 over the other tokens.

    Args:
        logits: [N, V] float32, divided by the temperature.
        labels: [N] int64, each in its support.
        support_ids: [N, K] int32, the tokens that were kept, -1 = padding. A row with only -1 keeps the whole
            vocabulary, and so does None.

    Returns:
        [N] float32.

    Example:
        >>> import torch
        >>> squared_score_norm(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([0]))  # 0.25 + 2 * 0.0625
        tensor([0.3750])
    """
    import torch

    if support_ids is not None and support_ids.shape[-1] > 0:
        is_kept, size = support_ids >= 0, logits.shape[-1]
        kept = torch.zeros(logits.shape[0], size + 1, dtype=torch.bool, device=logits.device)
        kept = kept.scatter(-1, torch.where(is_kept, support_ids, size).long(), True)[:, :size]
        logits = torch.where(kept | ~is_kept.any(-1, keepdim=True), logits, -torch.inf)
    probabilities = logits.softmax(-1)
    chosen = probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    others = probabilities.scatter(-1, labels.unsqueeze(-1), 0.0)
    return (1.0 - chosen).square() + others.square().sum(-1)
