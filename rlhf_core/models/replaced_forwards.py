"""Another forward for some modules of a model, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextmanager
def replaced_forwards(modules: Iterable[nn.Module], forward: Callable[[Any, Tensor], Tensor]) -> Iterator[None]:
    """Context in which each module computes `forward(module, inputs)`, but for those whose forward is replaced already.

    Use one context for a forward and its backward, since gradient checkpointing repeats the forward.
    """
    replaced = [module for module in modules if "forward" not in vars(module)]
    try:
        for module in replaced:
            module.forward = partial(forward, module)
        yield
    finally:
        for module in replaced:
            vars(module).pop("forward", None)  # a nested context may have removed it
