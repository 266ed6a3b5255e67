"""Data parallelism by torch: the full model in every process, gradients averaged by `DistributedDataParallel`."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_core.strategy import TrainedModel

from .base import StrategyBase
from .sections import TorchDdpConfig


class TorchDdpStrategy(StrategyBase):
    """Data-parallel training, with mixed precision by autocast over fp32 weights."""

    _config: TorchDdpConfig

    def unwrap(self, model: nn.Module) -> nn.Module:
        return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else cast(DistributedDataParallel, model).no_sync()

    def _wrap(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None
    ) -> TrainedModel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # `broadcast_buffers` was renamed in torch 2.13
            wrapped = DistributedDataParallel(
                model.to(self.device),
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=self._config.find_unused_parameters,
            )
        return TrainedModel(wrapped, optimizer, scheduler)
