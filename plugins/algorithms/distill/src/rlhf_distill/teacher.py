"""The pass of the teacher: a frozen model that says how likely it finds the tokens the policy sampled."""

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
"""Nats of the teacher: [A, 1] of the sampled token, or [A, K + 1] of the tokens in `IDS` and, last, of all others."""
IDS = "teacher_ids"
"""[A, K] the teacher's likeliest tokens; absent if it is asked about the sampled one."""


class TeacherPass(GroupPass):
    """Adds the columns `LOG_PROBS` and, with `top_k`, `IDS`."""

    columns: Mapping[str, Column] = {LOG_PROBS: Column(), IDS: Column(dtype="int32")}

    def __init__(self, context: PassContext, *, top_k: int, vocabulary: int) -> None:
        """vocabulary: only ids below it are given, those that the policy's tokenizer knows."""
        self._context = context
        self._top_k = top_k
        self._vocabulary = vocabulary

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        return [self.columns_of(row) for row in self._context.forward("teacher", groups, self.forward)]

    def forward(self, model: nn.Module, batch: Experience) -> Tensor:
        """[B, A, 1] float32 log-probs; with `top_k` [B, A, 2K + 1]: K + 1 log-probs, then K ids, exact in float32."""
        if not self._top_k:
            return policy_forward(model, batch, self._context.temperature).log_probs[..., None]

        def likeliest(logits: Tensor) -> Tensor:
            ids = logits[:, : self._vocabulary].topk(self._top_k, dim=-1).indices
            return torch.cat([with_rest(logits, ids), ids.float()], dim=-1)

        read = policy_forward(model, batch, self._context.temperature, read=likeliest).read
        assert read is not None
        return read

    def columns_of(self, row: Tensor) -> dict[str, Any]:
        """`forward` of some rows -> the columns."""
        if not self._top_k:
            return {LOG_PROBS: row}
        return {LOG_PROBS: row[..., : self._top_k + 1], IDS: row[..., self._top_k + 1 :]}
