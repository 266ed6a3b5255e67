"""Temporary replacement of the forward of some modules of a model."""

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
    """Context in which each module computes with its paired forward. At the end the previous one is restored.

    Use one context for a forward and its backward, since gradient checkpointing repeats the forward.
    """
    previous: list[tuple[nn.Module, Forward | None]] = []
    try:
        for module, forward in forwards:
            previous.append((module, vars(module).get("forward")))
            module.forward = forward
        yield
    finally:
        for module, old in reversed(previous):
            del module.forward
            if old is not None:
                module.forward = old


def forwards_of(
    models: Iterable[nn.Module], is_match: Callable[[nn.Module], bool], forward: Forward
) -> list[tuple[nn.Module, Forward]]:
    """Pair each matching module of `models` with `forward`, except modules whose forward is replaced already."""
    modules = (module for model in models for module in model.modules() if "forward" not in vars(module))
    return [(module, partial(forward, module)) for module in modules if is_match(module)]
