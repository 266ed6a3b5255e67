"""`low-level-zero`: ZeRO stages 1 and 2 (ColossalAI's `LowLevelZeroPlugin`).

Each process computes with full weights. Optimizer state, fp32 ("master") copies of half-precision weights and, in
stage 2, gradients are flat 1/N shards per parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlhf_core.strategy import StateBytes, TrainedModel
from rlhf_strategies import Prepared, torch_dtype

from .config import LowLevelZeroConfig
from .quiet_import import quietly
from .zero_strategy import ZeroStrategy

with quietly():
    from colossalai.booster.plugin import LowLevelZeroPlugin
    from colossalai.zero import LowLevelZeroOptimizer

if TYPE_CHECKING:
    from torch import Tensor, nn

_FIRST_LOSS_SCALE = 2.0**16
"""Initial loss scale for fp16."""


class LowLevelZeroStrategy(ZeroStrategy):
    """Shards optimizer state over processes, and gradients too in stage 2."""

    offload_options = ("cpu_offload",)
    _config: LowLevelZeroConfig

    @property
    def _keeps_masters(self) -> bool:
        """Whether ColossalAI keeps master weights. In fp32 they duplicate the weights, so only for offload."""
        return self._has_fp32_masters or self._config.cpu_offload

    def state_bytes(self, num_processes: int, dtype: torch.dtype) -> StateBytes:
        size = torch_dtype(self.precision).itemsize
        return StateBytes(
            weights=size,
            gradients=size / (num_processes if self._config.stage == 2 else 1),
            optimizer=self._optimizer_bytes / num_processes,
            reference=size,
        )

    def _plugin(self, model: nn.Module, max_grad_norm: float | None) -> LowLevelZeroPlugin:
        return LowLevelZeroPlugin(
            stage=self._config.stage,
            precision=self.precision,
            initial_scale=_FIRST_LOSS_SCALE,
            max_norm=max_grad_norm or 0.0,
            overlap_communication=self.device.type == "cuda",
            cpu_offload=self._config.cpu_offload,
            master_weights=self._keeps_masters,
        )

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Skip the reduction until the last micro-batch. Stage 2 cannot, since it never holds a full gradient."""
        if is_last or self._config.stage == 2:
            return nullcontext()
        context: AbstractContextManager[Any] = self._optimizer_of(model).no_sync()
        return context

    def _clip_at(self, optimizer: LowLevelZeroOptimizer, max_grad_norm: float | None) -> None:
        optimizer._clip_grad_norm = max_grad_norm or 0.0

    @contextlib.contextmanager
    def _recording_norm(self, optimizer: LowLevelZeroOptimizer, record: Callable[[float], None]) -> Iterator[None]:
        clip = optimizer._unscale_and_clip_grads
        loss_scale = getattr(optimizer.mixed_precision_mixin, "loss_scale", 1.0)  # 1 unless fp16

        def record_then_clip(grads: list[Tensor], scaled_norm: float) -> None:
            record(scaled_norm / loss_scale)
            clip(grads, scaled_norm)

        optimizer._unscale_and_clip_grads = record_then_clip
        try:
            yield
        finally:
            del optimizer._unscale_and_clip_grads
            for group, masters in optimizer._master_param_groups_of_current_rank.items():
                optimizer.optim.param_groups[group]["params"] = masters
                for master in masters:
                    master.grad = None
            optimizer.zero_grad()

    def _put_fp32(self, trained: TrainedModel, parameter: nn.Parameter, value: Tensor) -> None:
        optimizer: LowLevelZeroOptimizer = trained.optimizer
        optimizer.working_to_master_param[id(parameter)].copy_(self._own_shard(value))

    def _optimizer_of(self, model: nn.Module) -> LowLevelZeroOptimizer:
        return next(each.trained.optimizer for each in self._prepared if each.trained.model is model)

    def _master(self, prepared: Prepared | None, name: str) -> tuple[LowLevelZeroOptimizer, Tensor] | None:
        """The optimizer and this rank's flat fp32 shard of a parameter, None if it duplicates the parameter."""
        if prepared is None or name not in prepared.parameters:
            return None
        optimizer: LowLevelZeroOptimizer = prepared.trained.optimizer
        master = optimizer.working_to_master_param.get(id(prepared.parameters[name]))
        if master is None or not self._keeps_masters:
            return None
        return optimizer, master

    def _whole_weight(self, prepared: Prepared | None, name: str, tensor: Tensor) -> Tensor:
        master = self._master(prepared, name)
        if master is None or not self._has_fp32_masters:
            return tensor  # every process holds the full weights in full precision
        return self._gathered(master[1], tensor)

    def _put_weight(self, prepared: Prepared | None, name: str, target: Tensor, value: Tensor) -> None:
        target.copy_(value)
        master = self._master(prepared, name)
        if master is not None:
            with torch.no_grad():
                master[1].copy_(self._own_shard(value))

    def _gathered(self, shard: Tensor, like: Tensor) -> Tensor:
        """Gather a tensor of the shape of `like` from its flat, padded shards."""
        flat = shard.detach().to(self.device).flatten()
        whole = torch.empty(flat.numel() * self.world_size, dtype=flat.dtype, device=self.device)
        with self.group.guard("shards of a tensor"):
            dist.all_gather(list(whole.chunk(self.world_size)), flat)
        return whole[: like.numel()].view(like.shape)

    def _own_shard(self, value: Tensor) -> Tensor:
        flat = value.flatten()
        padding = -flat.numel() % self.world_size
        return torch.nn.functional.pad(flat, (0, padding)).chunk(self.world_size)[self.rank]

    def _optimizer_entries(self, prepared: Prepared) -> Iterator[tuple[str, dict[str, Any]]]:
        optimizer: LowLevelZeroOptimizer = prepared.trained.optimizer
        for name, parameter in prepared.parameters.items():
            master = optimizer.working_to_master_param.get(id(parameter))
            state = optimizer.optim.state.get(master, {}) if master is not None else {}
            if state:
                yield (
                    name,
                    {
                        key: int(value) if key == "step" else self._gathered(value, parameter)
                        for key, value in state.items()
                    },
                )

    def _put_optimizer_entry(self, prepared: Prepared, name: str, values: dict[str, Any]) -> None:
        optimizer: LowLevelZeroOptimizer = prepared.trained.optimizer
        master = optimizer.working_to_master_param[id(prepared.parameters[name])]
        optimizer.optim.state[master] = {
            key: torch.tensor(float(value), device=master.device)
            if key == "step"
            else self._own_shard(value).to(master.device, master.dtype).clone()
            for key, value in values.items()
        }
