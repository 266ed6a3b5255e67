"""Makes training passes faster and smaller with the same results: packing, products, what is kept, `torch.compile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..batching import fills_host_memory
from ..errors import ConfigError
from .fast_linear import fast_linears
from .lean_blocks import lean_mlps, lean_norms
from .packing import packed_attention
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


@contextmanager
def fast_passes(*models: nn.Module) -> Iterator[None]:
    """Context in which `models` run without padding, with faster matrix products and with less kept, where supported.

    Less is kept of large models only: in small ones the calls that save it take more time than the arithmetic.
    Use one context for a forward and its backward.
    """
    large = [model for model in models if saves_memory(model)]
    with fast_linears(*models), lean_mlps(*large), lean_norms(*large), packed_attention(*models):
        yield


def saves_memory(model: nn.Module) -> bool:
    """Whether passes through `model` should save host memory where that costs little: a large one on a CPU."""
    parameters = list(model.parameters())
    return bool(parameters) and fills_host_memory(
        parameters[0].device.type, sum(parameter.numel() for parameter in parameters)
    )


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
