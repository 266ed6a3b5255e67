"""Base of `ddp`, `low-level-zero` and `gemini`: one ColossalAI `Booster` per trained model."""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rlhf_core.strategy import Trained
from rlhf_strategies import Prepared, StrategyBase

from .quiet_import import ignore_deprecations, quietly

with quietly():
    from colossalai.booster import Booster
    from colossalai.interface import ModelWrapper, OptimizerWrapper

    from .host_support import use_host

if TYPE_CHECKING:
    from colossalai.booster.plugin.plugin_base import Plugin
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class BoosterStrategy(StrategyBase):
    """Wraps models with a Booster; subclasses provide its plugin."""

    def setup(self) -> None:
        use_host(self.device)
        ignore_deprecations()
        logging.getLogger("colossalai").setLevel(logging.WARNING)
        super().setup()

    def unwrap(self, model: nn.Module) -> nn.Module:
        while isinstance(model, (ModelWrapper, DistributedDataParallel)):
            model = model.module
        return model

    def _wrap(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None
    ) -> Trained:
        booster = Booster(plugin=self._plugin(model, max_grad_norm))
        tables = computed_buffers(model)
        with warnings.catch_warnings():
            # ColossalAI 0.5.0 is written for older versions of torch than ours, but still works.
            warnings.simplefilter("ignore")
            wrapped, wrapped_optimizer, _, _, _ = booster.boost(model, optimizer, lr_scheduler=scheduler)
        restore_buffers(self.unwrap(wrapped), tables, self.device)
        return Trained(wrapped, wrapped_optimizer, scheduler)

    @abstractmethod
    def _plugin(self, model: nn.Module, max_grad_norm: float | None) -> Plugin:
        """The Booster plugin of one trained model. Gemini and LowLevelZero clip through their constructors only."""

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        wrapper: OptimizerWrapper = optimizer
        with self.group.guard("the gradients of the other processes"):
            wrapper.backward(self.prepared_of(optimizer).loss_scale.applied_to(loss))

    def _inner_optimizer(self, prepared: Prepared) -> Any:
        wrapper: OptimizerWrapper = prepared.trained.optimizer
        return wrapper.optim


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Float buffers that are computed rather than stored, such as the frequencies of rotary embeddings."""
    stored = set(model.state_dict())
    return {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if name not in stored and torch.is_floating_point(buffer)
    }


def restore_buffers(model: nn.Module, buffers: dict[str, Tensor], device: torch.device) -> None:
    """Undo the cast of such buffers to half precision: in bf16, positions past a few hundred blur into one another."""
    own = dict(model.named_buffers())
    for name, value in buffers.items():
        own[name].data = value.to(device)
