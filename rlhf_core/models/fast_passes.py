"""What makes training passes faster and leaves their numbers as they are: packing, faster products, `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import ConfigError
from .blocks import transformer_blocks
from .fast_linear import fast_linears
from .packing import packed_attention


class CompiledBlocks:
    """Compiled forwards of the blocks of `models`: made at their first pass, kept for those that follow."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        blocks = [block for model in models for block in transformer_blocks(model)]
        # Batches differ in rows and length: graphs for any size, or each would be compiled anew.
        self._forwards = [(block, torch.compile(block.forward, dynamic=True)) for block in blocks]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The blocks run compiled inside; forward and backward belong into the same context.

        Raises `ConfigError` where torch cannot compile them.
        """
        try:
            for block, forward in self._forwards:
                block.forward = forward
            with explained_compiling("this model under this strategy", "train.compile"):
                yield
        finally:
            for block, _ in self._forwards:
                vars(block).pop("forward", None)


@contextmanager
def explained_compiling(what: str, option: str) -> Iterator[None]:
    """Raise `ConfigError` where torch cannot compile `what`, which the user asked for by `option`."""
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


@contextmanager
def fast_passes(*models: nn.Module) -> Iterator[None]:
    """Inside, `models` run without padding and with the faster matrix products, where they can.

    Forward and backward of one computation belong into the same context.
    """
    with fast_linears(*models), packed_attention(*models):
        yield
