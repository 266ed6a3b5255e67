"""`fsdp`: weights, gradients and optimizer state sharded over processes by PyTorch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rlhf_core.components import StrategyContext
from rlhf_core.distributed import read_launch_env
from rlhf_core.models import transformer_blocks
from rlhf_core.strategies import (
    Prepared,
    StrategyBase,
    check_offload,
    grouped_names,
    resolve_device,
    resolve_precision,
    torch_dtype,
)
from rlhf_core.strategy import StateBytes, Trained

from .config import FsdpConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class FsdpStrategy(StrategyBase):
    """Each process keeps 1/N of every tensor; a block is gathered only while it computes."""

    def __init__(self, config: FsdpConfig, device: torch.device) -> None:
        precision = resolve_precision(config.precision, device, on_cpu="fp32")
        super().__init__(device=device, precision=precision, timeout_seconds=config.timeout_seconds)
        self._config = config

    @property
    def shards_parameters(self) -> bool:
        return True

    def autocast(self) -> AbstractContextManager[Any]:
        """No autocast: `MixedPrecisionPolicy` casts the weights as they are gathered."""
        return contextlib.nullcontext()

    def state_bytes(self, num_processes: int, dtype: torch.dtype) -> StateBytes:
        return StateBytes(*(whole / num_processes for whole in super().state_bytes(num_processes, dtype)))

    def _wrap(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None
    ) -> Trained:
        groups = grouped_names(model, optimizer)
        model.to(self.device)
        self._shard(model)
        # Sharding replaced every parameter by a DTensor of the same name; the optimizer is still without state.
        sharded = dict(model.named_parameters())
        for group, own_names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [sharded[name] for name in own_names]
        return Trained(model, optimizer, scheduler)

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        dtype = None if self.precision == "fp32" else torch_dtype(self.precision)
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch_dtype("fp32"))
        offload = CPUOffloadPolicy() if self._config.offload else OffloadPolicy()
        for module in [*transformer_blocks(model), model]:
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=self._config.reshard_after_forward,
                mp_policy=mixed,
                offload_policy=offload,
            )

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module, is_last: bool) -> Iterator[None]:
        """Gradients are reduced at each micro-batch, so that they stay sharded: no unsharded copy is held."""
        sharded: FSDPModule = model  # type: ignore[assignment]  # fully_shard made it one
        sharded.set_is_last_backward(is_last)
        yield

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        """Shard a frozen model too: it is as large as the trained one."""
        model.requires_grad_(False).eval().to(self.device)
        self._shard(model)
        return model

    def _whole_weight(self, prepared: Prepared | None, name: str, tensor: Tensor) -> Tensor:
        with self.group.guard(f"the parts of {name}"):
            return whole_tensor(tensor)

    def _put_weight(self, prepared: Prepared | None, name: str, target: Tensor, value: Tensor) -> None:
        target.copy_(_part(target, value))

    def _whole_state(self, tensor: Tensor) -> Tensor:
        return whole_tensor(tensor)

    def _part_of_state(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        return _part(parameter, value)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor (collective); any other tensor is whole already."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(like: Tensor, value: Tensor) -> Tensor:
    """This rank's part of the full `value`, in the layout and type of `like`; no communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return value.to(like.device)
    local: DTensor = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return local


def build(config: FsdpConfig, context: StrategyContext) -> FsdpStrategy:
    """Make the strategy. Raises `ConfigError` for offload without a GPU."""
    device = resolve_device(context.device, read_launch_env().local_rank)
    check_offload(device, {"offload": config.offload})
    return FsdpStrategy(config, device)
