"""How models run over units of rows: core's own pass over padded rows, which is the base of faster ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..algorithm import Item
from ..functional.logprobs import Temperature, entropy, token_log_probs
from ..place import Place

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


class ForwardPasses:
    """Runs models over rows padded to the longest. The base of faster passes, which have the same numbers.

    A strategy names a subclass in `passes`. It is built without arguments, on every rank. Ranks and
    micro-batches are dealt by `price`; `applied` is entered for each forward and its backward, and within it
    `policy_forward` and `value_forward` call `lay_out` and `log_probs`.
    """

    def price(self, rows: Sequence[Item]) -> int:
        """Cost, in tokens, of one forward over `rows` (at least one). It never falls when rows are added.

        Rows may be summaries of samples that another rank holds: every rank must get the same price.
        """
        return len(rows) * max(row.num_tokens for row in rows)

    def applied(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context of one forward of `models` and its backward."""
        return nullcontext()

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


_APPLIED: ContextVar[ForwardPasses] = ContextVar("applied passes")


def passes_of(place: Place) -> ForwardPasses:
    """The passes that the place names."""
    passes: ForwardPasses = resolve_name(place.passes)()
    return passes


def applied_passes() -> ForwardPasses:
    """Those of the surrounding `applying`; padded rows outside of one."""
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
