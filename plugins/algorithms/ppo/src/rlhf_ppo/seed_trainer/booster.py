"""Adapt a ColossalAI `Booster` created by the user to a `Strategy`.

ColossalAI is not imported: any object with a Booster's methods (`backward`, `no_sync`, `save_model`, …) is accepted.
Models and optimizers were already passed to `booster.boost`, so this module never wraps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_core.errors import UserInputError
from rlhf_core.strategy import TrainedModel
from rlhf_core.util import load_tree, save_tree
from rlhf_forward import innermost
from rlhf_strategies import (
    GroupStrategy,
    LossScale,
    ProcessGroup,
    diverged,
    group_into_shards,
    state_dict_shards_of,
    torch_step,
)

_METHODS = ("backward", "no_sync", "save_model", "load_model", "save_optimizer", "load_optimizer")
_SHARDING = frozenset({"GeminiPlugin"})
"""Plugins that shard models across processes."""
_REFUSED = {"TorchFSDPPlugin": "fsdp"}
"""Plugins that cannot pass weights to an engine, and our strategy that replaces them."""
_NOT_ON_A_CPU = {"LowLevelZeroPlugin": "low-level-zero", "GeminiPlugin": "gemini"}
"""Plugins that need CUDA streams and kernels, and our strategy that also runs on a CPU."""
_OPTIMIZER_FILE = "optimizer.safetensors"
_TIMEOUT_SECONDS = 1800.0


def is_booster(candidate: object) -> bool:
    """Whether the object has the Booster methods used here."""
    return all(callable(getattr(candidate, name, None)) for name in _METHODS)


def tensor_parallel_size(booster: object) -> int:
    """Number of processes that share one layer: above 1 only with a tensor-parallel plugin."""
    return int(getattr(getattr(booster, "plugin", None), "tp_size", 1) or 1)


class BoosterAdapter(GroupStrategy):
    """A Booster with the model and optimizer it boosted.

    Gradients are clipped by the Booster's plugin, as everywhere in ColossalAI.
    """

    def __init__(self, booster: Any, model: nn.Module, optimizer: Optimizer) -> None:
        plugins = {kind.__name__ for kind in type(booster.plugin).__mro__}
        for name, ours in _REFUSED.items():
            if name in plugins:
                raise UserInputError(
                    f"{name} does not keep weights in a form that an engine can sample from",
                    where="PPOTrainer.actor_booster",
                    hint=f"pass the strategy `{ours}` of this framework instead",
                )
        device = _device_of(model)
        for name, ours in _NOT_ON_A_CPU.items():
            if name in plugins and device.type == "cpu":
                raise UserInputError(
                    f"a Booster of {name} does not train on a CPU",
                    where="PPOTrainer.actor_booster",
                    hint=f'pass rlhf_seed.strategy_by_name("{ours}") instead',
                )
        self._booster = booster
        self._optimizer = optimizer
        self._shards = bool(plugins & _SHARDING)
        super().__init__(ProcessGroup(device, _TIMEOUT_SECONDS))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.group.join()

    @property
    def shards_parameters(self) -> bool:
        return self._shards

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._shards else torch.float32

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        max_grad_norm: float | None = None,
    ) -> TrainedModel:
        """Accept a model and optimizer that are already boosted."""
        return TrainedModel(model, optimizer, scheduler)

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        plugin = self._booster.plugin
        if is_last or plugin is None or not plugin.support_no_sync():
            return nullcontext()
        context: AbstractContextManager[Any] = self._booster.no_sync(model, self._optimizer)
        return context

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        with self.group.guard("the gradients of the other processes"):
            self._booster.backward(loss, optimizer)

    def step(self, trained: TrainedModel) -> float:
        optimizer: Any = trained.optimizer
        if not self._knows_norm(optimizer):
            # A plain wrapper or a torch optimizer: the gradients are torch's.
            return torch_step(_torch_optimizer(optimizer), trained.scheduler, None, LossScale(enabled=False))
        with self.group.guard("the optimizer step of the other processes"):
            optimizer.step()
        norm = float(optimizer.get_grad_norm() or 0.0)
        optimizer.zero_grad()
        if not math.isfinite(norm):
            raise diverged(norm)
        if trained.scheduler is not None:
            trained.scheduler.step()
        return norm

    def drop_gradients(self, trained: TrainedModel) -> None:
        optimizer: Any = trained.optimizer
        optimizer.zero_grad()
        if self._shards:
            optimizer.chunk_manager.accumulating_grads = False  # Gemini's next backward overwrites its chunks

    def _knows_norm(self, optimizer: Any) -> bool:
        """Whether the optimizer clips in its step and reports the gradient norm.

        ZeRO, Gemini and hybrid optimizers do. The base wrapper does not.
        """
        method = getattr(type(optimizer), "get_grad_norm", None)
        return method is not None and method.__qualname__.partition(".")[0] != "OptimizerWrapper"

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = innermost(model)
        # `innermost` also unwraps PEFT, but the adapter is part of the model.
        return next((m for m in model.modules() if hasattr(m, "peft_config") and hasattr(m, "disable_adapter")), inner)

    def state_dict_shards(
        self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        if not self._shards:
            return state_dict_shards_of(self.unwrap(model), max_shard_bytes, only)
        gathered: Any = model
        parts = gathered.state_dict_shard(max_shard_size=max(1, max_shard_bytes >> 20), only_rank_0=False)
        named = ((name, tensor) for part, _ in parts for name, tensor in part.items() if only is None or only(name))
        return group_into_shards(named, max_shard_bytes)

    def save_model(self, model: nn.Module, path: Path) -> None:
        self._booster.save_model(model, str(path), shard=True, use_safetensors=True)

    def load_model(self, model: nn.Module, path: Path) -> None:
        self._booster.load_model(model, str(path))

    def save_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        """Save a torch optimizer as safetensors, and a sharded one in ColossalAI's own format."""
        if self._knows_norm(optimizer):
            self._booster.save_optimizer(optimizer, str(path), shard=True)
        elif self.is_main:
            save_tree(path / _OPTIMIZER_FILE, _torch_optimizer(optimizer).state_dict())

    def load_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        if self._knows_norm(optimizer):
            self._booster.load_optimizer(optimizer, str(path))
        else:
            _torch_optimizer(optimizer).load_state_dict(load_tree(path / _OPTIMIZER_FILE))


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside ColossalAI's plain wrapper."""
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def _device_of(model: nn.Module) -> torch.device:
    """The device this process computes on, even if a plugin has offloaded the parameters to the host."""
    device = next(model.parameters()).device
    if device.type == "cpu" and torch.cuda.is_available() and torch.distributed.is_initialized():
        backend = torch.distributed.get_backend()
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else device
    return device
