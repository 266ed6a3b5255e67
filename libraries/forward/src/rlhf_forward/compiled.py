"""The repeated blocks of a model, and running them through `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from rlhf_core.errors import ConfigError

from .replaced_forwards import replaced_forwards


class CompiledBlocks:
    """Compiled forwards of the blocks of `models`: compiled at their first pass, reused later."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        blocks = [block for model in models for block in transformer_blocks(model)]
        # Batches differ in rows and length: dynamic shapes, or each would be recompiled.
        self._forwards = [(block, torch.compile(block.forward, dynamic=True)) for block in blocks]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the blocks run compiled; use one context for a forward and its backward.

        Raises `ConfigError` where torch cannot compile them.
        """
        with replaced_forwards(self._forwards), explained_compiling("this model under this strategy", "train.compile"):
            yield


@contextmanager
def explained_compiling(what: str, option: str) -> Iterator[None]:
    """Raise `ConfigError` where torch cannot compile `what`, which `option` requested."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"torch cannot compile {what} ({reason})",
            where=option,
            hint=f"remove {option}, or start with --set {option}=false",
        ) from error


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the elements of its module lists that hold parameters.

    Deeper lists (experts of a block) belong to their block.
    """
    blocks: list[nn.Module] = []
    covered: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in covered:
            continue
        for block in module:
            if any(True for _ in block.parameters()):
                blocks.append(block)
            covered.update(id(inner) for inner in block.modules())
    return blocks
