"""AdamW with 8-bit moments (Dettmers 2022, arXiv:2110.02861), by bitsandbytes."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from rlhf_core.components import OptimizerContext

from .optimizers import AdamWConfig


def build(config: AdamWConfig, context: OptimizerContext) -> Optimizer:
    """Build the optimizer.

    Args:
        config: Options.
        context: Parameters of the model and the peak rate.

    Returns:
        The optimizer of bitsandbytes. Parameters of fewer than 4,096 elements keep 32-bit moments.
    """
    import bitsandbytes

    library: Any = bitsandbytes.optim
    optimizer = library.AdamW8bit(
        list(context.parameters.values()),
        lr=context.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    assert isinstance(optimizer, Optimizer)
    return optimizer
