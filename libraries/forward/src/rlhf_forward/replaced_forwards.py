"""Another forward for some modules of a model, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

Forward = Callable[..., Any]


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Context in which each module computes by the forward beside it; then what was in its place is there again.

    Use one context for a forward and its backward, since gradient checkpointing repeats the forward.
    """
    before: list[tuple[nn.Module, Forward | None]] = []
    try:
        for module, forward in forwards:
            before.append((module, vars(module).get("forward")))
            module.forward = forward
        yield
    finally:
        for module, own in reversed(before):
            del module.forward
            if own is not None:
                module.forward = own


def forwards_of(
    models: Iterable[nn.Module], is_one: Callable[[nn.Module], bool], forward: Forward
) -> list[tuple[nn.Module, Forward]]:
    """`forward` for each module of `models` that `is_one`, but for those whose forward is replaced already."""
    modules = (module for model in models for module in model.modules() if "forward" not in vars(module))
    return [(module, partial(forward, module)) for module in modules if is_one(module)]
