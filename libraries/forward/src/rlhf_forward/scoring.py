"""Passes of the reference and the critic over finished samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.algorithm import GroupPass, PassContext
from rlhf_core.types import Experience, Role, RolloutGroup

from .forward import policy_forward, value_forward

if TYPE_CHECKING:
    from torch import Tensor, nn


class _OnePass(GroupPass):
    def __init__(self, context: PassContext) -> None:
        self._context = context


class ReferencePass(_OnePass):
    """Adds `reference_log_probs`, log-probs of the sampled tokens at the temperature and support of the sampling."""

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        def log_probs(model: nn.Module, batch: Experience) -> Tensor:
            return policy_forward(model, batch, self._context.temperature).log_probs

        return [{"reference_log_probs": row} for row in self._context.forward("reference", groups, log_probs)]


class CriticPass(_OnePass):
    """Adds `values`, the critic's value of the state before each action."""

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        return [{"values": row} for row in self._context.forward("critic", groups, value_forward)]


def model_passes(context: PassContext, roles: Collection[Role]) -> list[GroupPass]:
    """Return the passes of roles: `reference_log_probs` for `reference`, `values` for `critic`.

    Args:
        context: The argument of `RolloutAlgorithm.passes`.
        roles: Roles of the algorithm. Others than `reference` and `critic` are ignored.

    Example:
        class MyUpdate(RolloutAlgorithm):
            def passes(self, context):
                return model_passes(context, self.roles)
    """
    pass_of: dict[Role, type[_OnePass]] = {"reference": ReferencePass, "critic": CriticPass}
    return [each(context) for role, each in pass_of.items() if role in roles]
