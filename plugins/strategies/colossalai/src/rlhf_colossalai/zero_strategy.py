"""Base of `low-level-zero` and `gemini`: one ColossalAI `Booster` per trained model.

A process computes with weights in the compute type. Training keeps fp32 ("master") weights, sharded like the state of
HybridAdam. ColossalAI unscales and clips the gradients within its step.
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
    """Base class. Subclasses create the Booster's plugin, write master weights, and hook its step to get the norm."""

    _adamw = RunHybridAdam

    @property
    def _has_fp32_masters(self) -> bool:
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
        """Bytes per parameter of Adam's moments, and of master weights if they are kept."""
        return 12 if self._has_fp32_masters else 8

    def autocast(self) -> AbstractContextManager[Any]:
        """Return an empty context, since the weights themselves have the compute type."""
        return nullcontext()

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        """Place a frozen model in full, with parameters cast to the policy's type.

        Otherwise the reference would differ from the policy before the first update. Computed buffers keep their
        precision.
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
        precise = {id(p): p.detach().clone() for p in model.parameters() if self._has_fp32_masters and p.requires_grad}
        if self.precision == "fp32":
            self._cast_parameters(model)  # ColossalAI does not cast weights that were loaded in 16 bits
        stored = model.state_dict()
        computed = {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name not in stored}
        with warnings.catch_warnings():
            # ColossalAI 0.5.0 was written for older versions of torch, but still works.
            warnings.simplefilter("ignore")
            booster = Booster(plugin=self._plugin(model, max_grad_norm))
            wrapped, wrapped_optimizer, *_ = booster.boost(model, optimizer, lr_scheduler=scheduler)
        trained = TrainedModel(wrapped, wrapped_optimizer, scheduler)
        # It also casts computed buffers, but a bf16 rotary table cannot distinguish positions past a few hundred.
        for name, buffer in self.unwrap(wrapped).named_buffers():
            if name in computed:
                buffer.data = computed[name].to(self.device)
        self._after_wrap(trained)
        # ColossalAI creates the fp32 weights from rounded ones. Restore their original precision.
        for parameter in self.unwrap(trained.model).parameters():
            if id(parameter) in precise:
                self._put_fp32(trained, parameter, precise.pop(id(parameter)))
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

        def record(norm: float) -> None:
            norms.append(norm)
            if not math.isfinite(norm):
                raise diverged(norm)

        self._clip_at(optimizer, self.prepared_of(trained.optimizer).max_grad_norm)  # it may change between steps
        with self._recording_norm(optimizer, record), self.group.guard("the optimizer step of the other processes"):
            optimizer.step()
        if not norms:
            return math.inf  # fp16 overflow: ColossalAI skipped the step and lowered its loss scale
        if trained.scheduler is not None:
            trained.scheduler.step()
        return norms[0]

    @abstractmethod
    def _plugin(self, model: nn.Module, max_grad_norm: float | None) -> Plugin:
        """Create the Booster plugin of one trained model. It takes the clipping norm through its constructor only."""

    def _after_wrap(self, trained: TrainedModel) -> None:
        """Hook for fixes needed before the master weights are written."""

    @abstractmethod
    def _put_fp32(self, trained: TrainedModel, parameter: nn.Parameter, value: Tensor) -> None:
        """Write this rank's part of the full fp32 `value` of a parameter to its master weights."""

    @abstractmethod
    def _clip_at(self, optimizer: Any, max_grad_norm: float | None) -> None:
        """Set the norm to which the optimizer's next step clips its gradients. None does not clip them."""

    @abstractmethod
    def _recording_norm(self, optimizer: Any, record: Callable[[float], None]) -> AbstractContextManager[None]:
        """Context of the optimizer's step, which calls `record` with the unscaled global norm before any change.

        On exit the gradients are released, and everything that a rejected step has moved is restored.
        """
