"""The pass: a small frozen model measures the novelty of each sampled token, which becomes a column."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rlhf_core import Column, Columns, Experience, RolloutGroup
from rlhf_core.algorithm import GroupPass, PassContext
from rlhf_forward import policy_forward

NOVELTY = "novelty"
"""Column: [A] float32, the nats by which the witness is surprised by each token of the response."""


class WitnessPass(GroupPass):
    """Fills the column `NOVELTY`. Core pads, splits, sends, buffers and checkpoints it."""

    columns: Mapping[str, Column] = {NOVELTY: Column()}

    def __init__(self, context: PassContext) -> None:
        self.context = context

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        """One mapping for each sample; every rank makes the same number of calls of `forward`."""
        return [{NOVELTY: row} for row in self.context.forward("witness", groups, self.surprise)]

    def surprise(self, model: nn.Module, batch: Experience) -> Tensor:
        """[B, A] nats. Other parts' columns are left out: inputs of the policy, and its first tokens' temperature."""
        return -policy_forward(model, replace(batch, columns=Columns()), self.context.temperature).log_probs
