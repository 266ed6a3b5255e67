"""`ddp`: the whole model in every process, gradients averaged (ColossalAI's `TorchDDPPlugin`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from rlhf_core.components import StrategyContext
from rlhf_core.place import resolve_device
from rlhf_strategies import resolve_precision

from .booster_strategy import BoosterStrategy
from .config import DdpConfig
from .quiet_import import quietly

with quietly():
    from colossalai.booster.plugin import TorchDDPPlugin

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel


class DdpStrategy(BoosterStrategy):
    """Data-parallel training; mixed precision by autocast over fp32 weights."""

    def __init__(self, config: DdpConfig, device: torch.device) -> None:
        precision = resolve_precision(config.precision, device, on_cpu="fp32")
        super().__init__(device=device, precision=precision, timeout_seconds=config.timeout_seconds)
        self._config = config

    def _plugin(self, model: nn.Module, max_grad_norm: float | None) -> TorchDDPPlugin:
        return TorchDDPPlugin(
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._config.find_unused_parameters,
        )

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        if is_last:
            return nullcontext()
        wrapped: DistributedDataParallel = cast(Any, model).module  # ColossalAI's wrapper around torch's
        return wrapped.no_sync()


def build(config: DdpConfig, context: StrategyContext) -> DdpStrategy:
    """Make the strategy; processes meet in `setup`."""
    return DdpStrategy(config, resolve_device(context.device))
