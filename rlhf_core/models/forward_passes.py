"""The cost of a model's forward pass over units of rows, and the context of the pass.

The computation of a pass belongs to a library (`rlhf_forward`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import chain
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ..algorithm import Item
from ..batching import default_micro_batch_tokens, plan_micro_batches
from ..place import Place

if TYPE_CHECKING:
    from torch import nn

Units = Sequence[Sequence[Item]]


class ForwardPasses:
    """The cost of a forward pass, and the context that it runs in.

    A place or strategy names a subclass in its attribute `passes`. The class is instantiated without arguments, on
    every rank. Rows are distributed to ranks by `price`, and to forward passes by `plan`. The context `applied`
    surrounds each forward pass and its backward pass. Inside it, `applied_passes` returns this object to the code that
    computes (`rlhf_forward`).

    Example:
        passes = resolve_name(place.passes)()  # on each rank
        for batch in passes.plan(units, max_tokens, place, model):
            with applying(passes, passes.applied(model)):
                loss(model, batch).backward()
    """

    def price(self, rows: Sequence[Item]) -> int:
        """Return the cost, in tokens, of one forward pass. Adding rows must never decrease it.

        By default the cost of rows padded to the longest.

        Args:
            rows: At least one. May be summaries of samples that another rank holds, and every rank must return the same
                price for them.
        """
        return len(rows) * max(row.num_tokens for row in rows)

    def plan(self, units: Units, max_tokens: int | None, place: Place, *models: nn.Module) -> list[list[int]]:
        """Distribute units over forward passes, by default by `plan_micro_batches` and `price`.

        Args:
            units: Rows that must share a pass, of this rank.
            max_tokens: Maximum cost of a pass, in tokens. A unit that costs more runs alone. None: a default for the
                device and the largest model.
            place: Where the models run.
            models: The models that run, as the strategy prepared them.

        Returns:
            Indices into `units` for each pass, each index once.
        """
        tokens = max_tokens or default_micro_batch_tokens(place.device.type, max(map(place.num_parameters, models)))
        return plan_micro_batches(units, tokens, lambda chosen: self.price([*chain.from_iterable(chosen)]))

    def applied(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one forward pass and its backward pass.

        Args:
            models: The models that run, as the strategy prepared them.
        """
        return nullcontext()


_APPLIED: ContextVar[ForwardPasses] = ContextVar("applied passes")


def passes_of(place: Place) -> ForwardPasses:
    """Instantiate the passes that the place names."""
    passes: ForwardPasses = resolve_name(place.passes)()
    return passes


def applied_passes() -> ForwardPasses:
    """Return the passes of the surrounding `applying`, or the base class outside of one."""
    return _APPLIED.get(ForwardPasses())


@contextmanager
def applying(passes: ForwardPasses, inside: AbstractContextManager[Any]) -> Iterator[None]:
    """Context in which forwards use `passes`. `inside`: `passes.applied(...)`, or a context that replaces it."""
    token = _APPLIED.set(passes)
    try:
        with inside:
            yield
    finally:
        _APPLIED.reset(token)
