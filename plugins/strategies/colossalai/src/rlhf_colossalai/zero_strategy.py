"""Base of `low-level-zero` and `gemini`: one ColossalAI `Booster` per trained model.

A process computes with weights in the compute type. Training keeps finer (fp32, "master") weights, sharded like the
state of HybridAdam; ColossalAI unscales and clips the gradients within its step.
"""

from __future__ import annotations

import logging
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_core.strategy import TrainedModel
from rlhf_strategies import Prepared, StrategyBase, diverged, torch_dtype

from .quiet_import import ignore_deprecations, quietly

with quietly():
    from colossalai.booster import Booster
    from colossalai.interface import ModelWrapper

    from .adam import RunHybridAdam
    from .host_support import use_host

if TYPE_CHECKING:
    from colossalai.booster.plugin.plugin_base import Plugin


class ZeroStrategy(StrategyBase):
    """Subclasses bring the Booster's plugin, and locate the finer weights and where in its step the norm is known."""

    _adamw = RunHybridAdam

    @property
    def _keeps_finer(self) -> bool:
        return self.precision != "fp32"

    def setup(self) -> None:
        use_host(self.device)
        ignore_deprecations()
        logging.getLogger("colossalai").setLevel(logging.WARNING)
        super().setup()

    def unwrap(self, model: nn.Module) -> nn.Module:
        while isinstance(model, ModelWrapper):
            model = model.module
        return model

    @property
    def _optimizer_bytes(self) -> int:
        """Bytes per parameter of Adam's moments, and of the finer weights where they are kept."""
        return 12 if self._keeps_finer else 8

    def autocast(self) -> AbstractContextManager[Any]:
        """No autocast: the weights themselves have the compute type."""
        return nullcontext()

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        """Place a frozen model whole, parameters cast to the policy's type: otherwise the reference would differ from
        it before the first update. Computed buffers keep their precision.
        """
        model.requires_grad_(False).eval().to(self.device)
        self._cast_parameters(model)
        return model

    def _cast_parameters(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch_dtype(self.precision))

    def _wrap(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None
    ) -> TrainedModel:
        finer = {id(p): p.detach().clone() for p in model.parameters() if self._keeps_finer and p.requires_grad}
        if self.precision == "fp32":
            self._cast_parameters(model)  # ColossalAI does not cast weights that were loaded in 16 bits
        stored = model.state_dict()
        computed = {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name not in stored}
        with warnings.catch_warnings():
            # ColossalAI 0.5.0 is written for older versions of torch than ours, but still works.
            warnings.simplefilter("ignore")
            booster = Booster(plugin=self._plugin(model, max_grad_norm))
            wrapped, wrapped_optimizer, *_ = booster.boost(model, optimizer, lr_scheduler=scheduler)
        trained = TrainedModel(wrapped, wrapped_optimizer, scheduler)
        # It casts computed buffers too: positions past a few hundred blur into one another in a bf16 rotary table.
        for name, buffer in self.unwrap(wrapped).named_buffers():
            if name in computed:
                buffer.data = computed[name].to(self.device)
        self._after_wrap(trained)
        # ColossalAI makes the fp32 weights from rounded ones; restore their original precision.
        for parameter in self.unwrap(trained.model).parameters():
            if id(parameter) in finer:
                self._put_finer(trained, parameter, finer.pop(id(parameter)))
        return trained

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        wrapper: Any = optimizer  # it scales the loss in fp16
        with self.group.guard("the gradients of the other processes"):
            wrapper.backward(loss)

    def _inner_optimizer(self, prepared: Prepared) -> Any:
        wrapper: Any = prepared.trained.optimizer
        return wrapper.optim

    def step(self, trained: TrainedModel) -> float:
        optimizer: Any = trained.optimizer
        norms: list[float] = []

        def note(norm: float) -> None:
            norms.append(norm)
            if not math.isfinite(norm):
                raise diverged(norm)

        with self._norm_noted(optimizer, note), self.group.guard("the optimizer step of the other processes"):
            optimizer.step()
        if not norms:
            return math.inf  # fp16 found an overflow: ColossalAI skipped the step and lowered its loss scale
        if trained.scheduler is not None:
            trained.scheduler.step()
        return norms[0]

    @abstractmethod
    def _plugin(self, model: nn.Module, max_grad_norm: float | None) -> Plugin:
        """The Booster plugin of one trained model. It clips through its constructor only."""

    def _after_wrap(self, trained: TrainedModel) -> None:
        """Hook for fixes needed before the finer weights are written."""

    @abstractmethod
    def _put_finer(self, trained: TrainedModel, parameter: nn.Parameter, value: Tensor) -> None:
        """Write the full fp32 `value` of a parameter where this rank holds its part."""

    @abstractmethod
    def _norm_noted(self, optimizer: Any, note: Callable[[float], None]) -> AbstractContextManager[None]:
        """Context of the optimizer's step; calls `note` with the unscaled global norm before anything changes.

        On exit the gradients are released, and anything a refused step has moved is restored.
        """
