"""`fsdp`: weights, gradients and optimizer state sharded over processes by PyTorch's `fully_shard` (FSDP2).

With `tensor_parallel: N` the processes form a two-dimensional mesh: groups of N compute the same rows together
(`tensor_parallel.py`), and `fully_shard` shards over the groups, which have different rows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_core.errors import UserInputError
from rlhf_core.place import ReduceOp
from rlhf_core.strategy import StateBytes, TrainedModel
from rlhf_strategies import (
    ProcessGroup,
    StrategyBase,
    grouped_names,
    stored_parameters,
    torch_dtype,
    use_liger,
    weights_left_in_files,
)

from .blocks import transformer_blocks
from .config import FsdpConfig
from .tensor_parallel import parallelise
from .tensor_parallel_plan import WHERE, plan_of
from .vocabulary_parallel import vocabulary_modules

ValueT = TypeVar("ValueT")


class FsdpStrategy(StrategyBase):
    """Each process keeps 1/N of every tensor. A block is gathered only while it computes.

    `rank` and `world_size` count tensor-parallel groups, since all processes of a group receive the same rows.
    """

    shards_parameters = True
    offload_options = ("offload",)
    _config: FsdpConfig
    _mesh: DeviceMesh | None = None

    def setup(self) -> None:
        super().setup()
        if (size := self._config.tensor_parallel) > 1:
            if self.num_processes % size:  # only in scripts: run files are checked before anything starts
                raise UserInputError(
                    f"{self.num_processes} processes do not form groups of {size}",
                    where=WHERE,
                    hint=f"start a multiple of {size} processes, or set tensor_parallel to a divisor of their number",
                )
            self._mesh = make_mesh(self.group, size)

    def teardown(self) -> None:
        self._mesh = None
        super().teardown()

    @property
    def rank(self) -> int:
        return self.group.rank // self._config.tensor_parallel

    @property
    def world_size(self) -> int:
        return self.group.world_size // self._config.tensor_parallel

    @property
    def is_main(self) -> bool:
        return self.group.rank == 0

    @property
    def num_processes(self) -> int:
        return self.group.world_size

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce over groups for `sum`, so that each group counts once, and over all processes for `min` and `max`."""
        among = None if self._mesh is None or op != "sum" else self._mesh.get_group("data")
        return self.group.all_reduce(tensor.to(self.device), op, among).to(tensor.device)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Gather one value per tensor-parallel group, that of its first process, so all its processes agree."""
        return super().all_gather_objects(value)[:: self._config.tensor_parallel]

    def agreed(self, value: ValueT) -> ValueT:
        common: ValueT = self.all_gather_objects(value)[self.rank] if self._mesh is not None else value
        return common

    def autocast(self) -> AbstractContextManager[Any]:
        """No autocast: `MixedPrecisionPolicy` casts the weights as they are gathered."""
        return contextlib.nullcontext()

    def state_bytes(self, num_processes: int, dtype: torch.dtype) -> StateBytes:
        whole = super().state_bytes(num_processes, dtype)
        size, is_split = self._config.tensor_parallel, self._config.sequence_parallel
        return StateBytes(
            weights=whole.weights / num_processes,
            gradients=whole.gradients / num_processes,
            optimizer=whole.optimizer / num_processes,
            reference=whole.reference / num_processes,
            # Korthikanti 2022, tables 2 and 3: 10 of 34 parts are between the split matrices.
            activations=1 / size if is_split else (10 + 24 / size) / 34,
        )

    def gathered_bytes(self, model: nn.Module) -> int:
        """Estimate the bytes of gathered weights and gradients at their peak.

        Two blocks are gathered at a time, one that computes and the next one, plus all parameters outside of blocks. A
        gradient exists twice, once in the layout for its reduction. A tensor-parallel process computes with its part
        of a block, and of the vocabulary if that is split.
        """
        size = self._config.tensor_parallel
        blocks = [list(block.parameters()) for block in transformer_blocks(model)]
        inside = {id(parameter) for block in blocks for parameter in block}
        split = inside | {id(module.weight) for module in vocabulary_modules(model, size)}

        def num_held(parameters: Iterable[nn.Parameter]) -> float:
            return sum(each.numel() / (size if id(each) in split else 1) for each in parameters)

        outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        weights = 2 * max(map(num_held, blocks), default=0.0) + num_held(outside)
        trained = [[each for each in part if each.requires_grad] for part in (*blocks, outside)]
        width = 4 if self.compute_dtype is None else self.compute_dtype.itemsize
        return round(weights * width + 2 * 4 * max(map(num_held, trained)))

    def check_model(self, model: nn.Module) -> None:
        if self._config.tensor_parallel > 1:
            plan_of(model, self._config.tensor_parallel)

    def _wrap(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None
    ) -> TrainedModel:
        groups = grouped_names(model, optimizer)
        self._shard(model)
        # Sharding replaced every parameter by a DTensor of the same name. The optimizer does not have state yet.
        sharded = dict(model.named_parameters())
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [sharded[name] for name in names]
        return TrainedModel(model, optimizer, scheduler)

    def model_init_context(self) -> AbstractContextManager[Any]:
        """Leave weights in their files. Each process reads its part once the model is sharded."""
        return weights_left_in_files()

    def _shard(self, model: nn.Module) -> None:
        stored = stored_parameters(model)
        if not stored:
            model.to(self.device)  # `fully_shard` moves blank weights block by block
        self._make_sharded(model)
        for name, parameter in model.named_parameters():
            if name in stored:
                stored[name].read_into(parameter)

    def _make_sharded(self, model: nn.Module) -> None:
        if self._mesh is None:
            mesh = init_device_mesh(self.device.type, (self.world_size,))
        else:
            parallelise(model, self._mesh["tensor"], sequence_parallel=self._config.sequence_parallel)
            mesh = self._mesh["data"]
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
        """Reduce gradients at each micro-batch, so that an unsharded copy is never held."""
        sharded: FSDPModule = model  # type: ignore[assignment]  # fully_shard made it one
        sharded.set_is_last_backward(is_last)
        yield

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        """Shard a frozen model too, since it is as large as the trained one."""
        if self._uses_liger:
            use_liger(model)
        self._shard(model.requires_grad_(False).eval())
        return model


def make_mesh(group: ProcessGroup, tensor_parallel: int) -> DeviceMesh:
    """Create the mesh [groups, processes per group]. Ranks of a group are adjacent, so usually on one machine."""
    # torch logs, at each gather over both dimensions, that one collective call would be faster than two.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ranks = torch.arange(group.world_size).view(-1, tensor_parallel)
    timeout = timedelta(seconds=group.timeout_seconds)
    own: list[dist.ProcessGroup] = []
    with group.guard("the groups of the device mesh"):
        for parts in (ranks.T.tolist(), ranks.tolist()):
            groups = [dist.new_group(part, timeout=timeout) for part in parts]  # every process creates all groups
            own.append(next(each for each, part in zip(groups, parts, strict=True) if group.rank in part))
    return DeviceMesh.from_group(own, group.device.type, mesh=ranks, mesh_dim_names=("data", "tensor"))
