"""The pass: a small frozen model measures the novelty of each sampled token, which becomes a column."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rlhf_core import Column, Columns, Experience, RolloutGroup
from rlhf_core.algorithm import GroupPass, PassContext
from rlhf_forward import policy_forward

NOVELTY = "novelty"
"""Column: surprise of the witness at each token of the response, [A] float32, in nats."""


class WitnessPass(GroupPass):
    """Fills the column `NOVELTY`. Core pads, splits, sends, buffers and checkpoints it."""

    columns: Mapping[str, Column] = {NOVELTY: Column()}

    def __init__(self, context: PassContext) -> None:
        self.context = context

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        """Return one mapping for each sample. Every rank calls `forward` equally often."""
        return [{NOVELTY: row} for row in self.context.forward("witness", groups, self.surprise)]

    def surprise(self, model: nn.Module, batch: Experience) -> Tensor:
        """Return the surprise, [B, A] in nats, without columns of other parts (model inputs, temperatures)."""
        return -policy_forward(model, replace(batch, columns=Columns()), self.context.temperature).log_probs
