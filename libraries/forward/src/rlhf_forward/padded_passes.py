"""Forward passes over rows padded to the longest, which is the base of faster ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.models.forward_passes import ForwardPasses, applied_passes

from .logprobs import Temperature, entropy, token_log_probs

if TYPE_CHECKING:
    from .rows import PaddedRows


class ActionLabels(NamedTuple):
    """What is computed of the logits at the N positions that predict an action."""

    labels: Tensor
    """[N] int64: the actions."""
    temperature: Temperature
    """Divides the logits: one, or [N, 1] with that of each action."""
    with_entropy: bool
    """Whether entropies are needed."""
    entropy_grad: bool
    """Whether they need a gradient."""


class PaddedPasses(ForwardPasses):
    """Runs models over rows padded to the longest. The base of faster passes, which have the same numbers.

    Within `applied`, `policy_forward` and `value_forward` call `lay_out` and `log_probs`.
    """

    def lay_out(self, model: nn.Module, rows: PaddedRows) -> Any:
        """The rows in the form in which the innermost `model` is given them.

        An object with `inputs` (arguments of the forward by name), `lengths`, `logits_to_keep` and `of_actions`, as
        those of `PaddedRows`; `of_actions` keeps the order of actions.
        """
        return rows

    def log_probs(
        self, model: nn.Module, rows: Any, run: Callable[[], Tensor], wanted: ActionLabels
    ) -> tuple[Tensor, Tensor | None]:
        """[N] float32 nats each: log-probs of the labels, and entropies if they are needed, from one forward.

        Args:
            model: the innermost model.
            rows: those of `lay_out`.
            run: runs the forward; returns its logits per position.
            wanted: labels, and what is computed.
        """
        return plain_log_probs(rows.of_actions(run()), wanted)


def plain_log_probs(
    logits: Tensor, wanted: ActionLabels, support: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`token_log_probs` of logits [N, V], and `entropy` if it is needed: [N] float32 nats each."""
    log_probs = token_log_probs(logits, wanted.labels, wanted.temperature, support)
    if not wanted.with_entropy:
        return log_probs, None
    with torch.set_grad_enabled(wanted.entropy_grad and torch.is_grad_enabled()):
        return log_probs, entropy(logits, wanted.temperature, support)


def current_passes() -> PaddedPasses:
    """The applied passes; padded ones if those that are applied only have a price and a context, or if none are."""
    applied = applied_passes()
    return applied if isinstance(applied, PaddedPasses) else PaddedPasses()
