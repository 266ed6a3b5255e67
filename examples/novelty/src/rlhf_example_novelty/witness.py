"""The pass: a small frozen model measures the novelty of each sampled token, stored in a column."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rlhf_core import Column, Columns, Experience, RolloutGroup
from rlhf_core.algorithm import GroupPass, PassContext
from rlhf_forward import policy_forward

NOVELTY = "novelty"
"""Column [A] float32: the witness's surprise at each token of the response, in nats."""


class WitnessPass(GroupPass):
    """Fills the column `NOVELTY`, which core pads, splits, sends, buffers and checkpoints."""

    columns: Mapping[str, Column] = {NOVELTY: Column()}

    def __init__(self, context: PassContext) -> None:
        self.context = context

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        """Return one mapping per sample. Every rank makes the same number of calls of `forward`."""
        return [{NOVELTY: row} for row in self.context.forward("witness", groups, self.surprise)]

    def surprise(self, model: nn.Module, batch: Experience) -> Tensor:
        """Surprise [B, A] in nats, without the columns of other parts (inputs of the policy, first temperatures)."""
        return -policy_forward(model, replace(batch, columns=Columns()), self.context.temperature).log_probs
