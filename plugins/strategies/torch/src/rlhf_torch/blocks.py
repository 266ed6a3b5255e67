"""The repeated blocks of a model."""

from __future__ import annotations

from torch import nn


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the repeated blocks of a model: the elements of its module lists that hold parameters.

    Nested lists (experts of a block) belong to their block.

    Example:
        >>> layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        >>> transformer_blocks(nn.ModuleDict({"layers": layers}))
        [Linear(in_features=2, out_features=2, bias=True), Linear(in_features=2, out_features=2, bias=True)]
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
