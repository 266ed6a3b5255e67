"""Forward passes over rows padded to the longest, the base of faster passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.models.forward_passes import ForwardPasses, applied_passes, applying, passes_of

from .logprobs import Temperature, entropy, token_log_probs

if TYPE_CHECKING:
    from rlhf_core.models.forward_passes import Units
    from rlhf_core.place import Place

    from .rows import PaddedRows


class ActionLabels(NamedTuple):
    """Labels and options of the computation on the logits at the N positions that predict an action."""

    labels: Tensor
    """[N] int64: the actions."""
    temperature: Temperature
    """Divides the logits: one number, or [N, 1] with the temperature of each action."""
    with_entropy: bool
    """Whether to compute entropies."""
    entropy_grad: bool
    """Whether entropies have a gradient."""


class PaddedPasses(ForwardPasses):
    """Runs models over rows padded to the longest. Base class of faster passes with the same results.

    Within `applied`, on every rank, `policy_forward` calls `lay_out` and then `log_probs`, and `value_forward` calls
    `lay_out`.

    Example:
        with applying(passes, passes.applied(model)):  # by core, for each forward pass and its backward pass
            rows = passes.lay_out(innermost(model), rows)  # by policy_forward
            log_probs, entropies = passes.log_probs(innermost(model), rows, run, wanted)
            backward(loss(log_probs))
    """

    def lay_out(self, model: nn.Module, rows: PaddedRows) -> Any:
        """Return the rows in the layout that the model receives.

        Args:
            model: The innermost model.
            rows: The rows, padded on the right.

        Returns:
            An object with `inputs` (keyword arguments of the forward), `lengths`, `logits_to_keep` and `of_actions`, as
            in `PaddedRows`. `of_actions` keeps the order of actions.
        """
        return rows

    def log_probs(
        self, model: nn.Module, rows: Any, run: Callable[[], Tensor], wanted: ActionLabels
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log-probs of the labels, and entropies if needed, with one forward pass.

        Args:
            model: The innermost model.
            rows: The result of `lay_out`.
            run: Runs the forward pass and returns its logits per position.
            wanted: Labels and options.

        Returns:
            [N] float32 nats each. The entropies are None if they are not needed.
        """
        return plain_log_probs(rows.of_actions(run()), wanted)


class PlacePasses:
    """Forward passes through models with the passes that a place names, for code outside of core's loop.

    Example:
        passes = PlacePasses(strategy, trained.model)
        for plan in passes.plan([[row] for row in rows], max_tokens=None):
            with passes.applied(), strategy.autocast():
                log_probs = label_log_probs(trained.model, input_ids, attention_mask, is_read, labels)
                strategy.backward(loss(log_probs), trained.optimizer)
    """

    def __init__(self, place: Place, *models: nn.Module) -> None:
        """Create the passes of one plan.

        Args:
            place: The place or strategy.
            models: The models that run, as the strategy prepared them.
        """
        self._passes, self._place, self._models = passes_of(place), place, models

    def plan(self, units: Units, max_tokens: int | None) -> list[list[int]]:
        """Distribute units over forward passes (`ForwardPasses.plan`).

        Args:
            units: Rows that must share a pass, of this rank. Each row has its length, `num_tokens`.
            max_tokens: Maximum cost of a pass, in tokens. None: the default for the device and the largest model.

        Returns:
            Indices into `units` for each pass, each index once.
        """
        return self._passes.plan(units, max_tokens, self._place, *self._models)

    def applied(self) -> AbstractContextManager[None]:
        """Return the context of one forward pass and its backward pass."""
        return applying(self._passes, self._passes.applied(*self._models))


def plain_log_probs(
    logits: Tensor, wanted: ActionLabels, support: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return `token_log_probs` of logits [N, V], and `entropy` if needed: [N] float32 nats each."""
    log_probs = token_log_probs(logits, wanted.labels, wanted.temperature, support)
    if not wanted.with_entropy:
        return log_probs, None
    with torch.set_grad_enabled(wanted.entropy_grad and torch.is_grad_enabled()):
        return log_probs, entropy(logits, wanted.temperature, support)


def current_passes() -> PaddedPasses:
    """Return the applied passes, or padded ones if none are applied or they only define a price and a context."""
    applied = applied_passes()
    return applied if isinstance(applied, PaddedPasses) else PaddedPasses()
