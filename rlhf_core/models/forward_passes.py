"""How models run over units of rows: the price of a forward pass, and its context.

What a pass computes is a library's (`rlhf_forward`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ..algorithm import Item
from ..place import Place

if TYPE_CHECKING:
    from torch import nn


class ForwardPasses:
    """The price of a forward pass, and the context that it runs in.

    A place or strategy names a subclass in `passes`. It is built without arguments, on every rank. Ranks and
    micro-batches are dealt by `price`. `applied` is entered for each forward and its backward. Within it
    `applied_passes` returns this object to the code that computes (`rlhf_forward`).
    """

    def price(self, rows: Sequence[Item]) -> int:
        """Cost, in tokens, of one forward over `rows` (at least one). It never falls when rows are added.

        Rows may be summaries of samples that another rank holds: every rank must get the same price. By default, the
        cost of rows padded to the longest.
        """
        return len(rows) * max(row.num_tokens for row in rows)

    def applied(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context of one forward of `models` and its backward."""
        return nullcontext()


_APPLIED: ContextVar[ForwardPasses] = ContextVar("applied passes")


def passes_of(place: Place) -> ForwardPasses:
    """The passes that the place names."""
    passes: ForwardPasses = resolve_name(place.passes)()
    return passes


def applied_passes() -> ForwardPasses:
    """Those of the surrounding `applying`; the base class outside of one."""
    return _APPLIED.get(ForwardPasses())


@contextmanager
def applying(passes: ForwardPasses, inside: AbstractContextManager[Any]) -> Iterator[None]:
    """Context in which forwards run by `passes`. inside: `passes.applied(...)`, or a context in its place."""
    token = _APPLIED.set(passes)
    try:
        with inside:
            yield
    finally:
        _APPLIED.reset(token)
