"""Forward pass of the teacher, a frozen model that scores the tokens sampled by the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core import Column
from rlhf_core.algorithm import GroupPass, PassContext
from rlhf_core.types import Experience, RolloutGroup
from rlhf_forward import policy_forward

from .divergence import with_rest

LOG_PROBS = "teacher_log_probs"
"""The teacher's log-probs in nats: [A, 1] of the sampled token, or [A, K + 1] of the tokens in `IDS` and all others."""
IDS = "teacher_ids"
"""The teacher's K most likely tokens, [A, K]. Absent without `top_k`."""


class TeacherPass(GroupPass):
    """Add the columns `LOG_PROBS` and, with `top_k`, `IDS`."""

    columns: Mapping[str, Column] = {LOG_PROBS: Column(), IDS: Column(dtype="int32")}

    def __init__(self, context: PassContext, *, top_k: int, vocabulary: int) -> None:
        """Create the pass.

        Args:
            context: Models and sampling settings of the run.
            top_k: Number of the teacher's tokens to return. 0 scores the sampled token.
            vocabulary: Size of the policy's tokenizer. `IDS` contains only smaller ids.
        """
        self._context = context
        self._top_k = top_k
        self._vocabulary = vocabulary

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        return [self.columns_of(row) for row in self._context.forward("teacher", groups, self.forward)]

    def forward(self, model: nn.Module, batch: Experience) -> Tensor:
        """Return [B, A, 1] float32 log-probs, or with `top_k` [B, A, 2K + 1]: K + 1 log-probs, then K ids, exact in
        float32.
        """
        if not self._top_k:
            return policy_forward(model, batch, self._context.temperature).log_probs[..., None]

        def most_likely(logits: Tensor) -> Tensor:
            ids = logits[:, : self._vocabulary].topk(self._top_k, dim=-1).indices
            return torch.cat([with_rest(logits, ids), ids.float()], dim=-1)

        read = policy_forward(model, batch, self._context.temperature, read=most_likely).read
        assert read is not None
        return read

    def columns_of(self, row: Tensor) -> dict[str, Any]:
        """Split rows of the output of `forward` into columns."""
        if not self._top_k:
            return {LOG_PROBS: row}
        return {LOG_PROBS: row[..., : self._top_k + 1], IDS: row[..., self._top_k + 1 :]}
