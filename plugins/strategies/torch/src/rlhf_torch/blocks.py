"""The repeated blocks of a model."""

from __future__ import annotations

from torch import nn


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
