"""`fsdp`: weights, gradients and optimizer state sharded over processes by PyTorch's `fully_shard` (FSDP2).

With `tensor_parallel: N` the processes form a mesh of two dimensions: groups of N that compute the same rows together
(`tensor_parallel.py`), and over these groups, which share the rows, `fully_shard`.
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
    weights_left_in_files,
)

from .blocks import transformer_blocks
from .config import FsdpConfig
from .tensor_parallel import parallelise
from .tensor_parallel_plan import WHERE, plan_of
from .vocabulary_parallel import vocabulary_modules

ValueT = TypeVar("ValueT")


class FsdpStrategy(StrategyBase):
    """Each process keeps 1/N of every tensor; a block is gathered only while it computes.

    `rank` and `world_size` are those of a tensor-parallel group: all its processes are given the same rows.
    """

    shards_parameters = True
    offload_options = ("offload",)
    _config: FsdpConfig
    _mesh: DeviceMesh | None = None

    def setup(self) -> None:
        super().setup()
        if (size := self._config.tensor_parallel) > 1:
            if self.num_processes % size:  # of a script: a run file's are checked before anything starts
                raise UserInputError(
                    f"{self.num_processes} processes do not form groups of {size}",
                    where=WHERE,
                    hint=f"start a multiple of {size}, or set tensor_parallel to a divisor of their number",
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
        """Over all processes where the same value counts once: the largest and the smallest."""
        among = None if self._mesh is None or op != "sum" else self._mesh.get_group("data")
        return self.group.all_reduce(tensor.to(self.device), op, among).to(tensor.device)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Of each tensor-parallel group its first process's value, so that all of it go on with the same."""
        return super().all_gather_objects(value)[:: self._config.tensor_parallel]

    def agreed(self, value: ValueT) -> ValueT:
        own: ValueT = self.all_gather_objects(value)[self.rank] if self._mesh is not None else value
        return own

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
            # Korthikanti 2022, tables 2 and 3: 10 of 34 parts lie between the split matrices.
            activations=1 / size if is_split else (10 + 24 / size) / 34,
        )

    def gathered_bytes(self, model: nn.Module) -> int:
        """Blocks are gathered one after the other, the next one while one computes; what is outside of them, at once.

        A gradient is there twice, as it is and laid out to be reduced. A tensor-parallel process computes with its
        part of a block, and of the vocabulary where that is split.
        """
        size = self._config.tensor_parallel
        blocks = [list(block.parameters()) for block in transformer_blocks(model)]
        inside = {id(parameter) for block in blocks for parameter in block}
        split = inside | {id(module.weight) for module in vocabulary_modules(model, size)}

        def held(parameters: Iterable[nn.Parameter]) -> float:
            return sum(each.numel() / (size if id(each) in split else 1) for each in parameters)

        outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        weights = 2 * max(map(held, blocks), default=0.0) + held(outside)
        trained = [[each for each in part if each.requires_grad] for part in (*blocks, outside)]
        width = 4 if self.compute_dtype is None else self.compute_dtype.itemsize
        return round(weights * width + 2 * 4 * max(map(held, trained)))

    def check_model(self, model: nn.Module) -> None:
        if self._config.tensor_parallel > 1:
            plan_of(model, self._config.tensor_parallel)

    def _wrap(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None
    ) -> TrainedModel:
        groups = grouped_names(model, optimizer)
        self._shard(model)
        # Sharding replaced every parameter by a DTensor of the same name; the optimizer is still without state.
        sharded = dict(model.named_parameters())
        for group, own_names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [sharded[name] for name in own_names]
        return TrainedModel(model, optimizer, scheduler)

    def model_init_context(self) -> AbstractContextManager[Any]:
        """Weights stay in their files: each process reads its part once the model is sharded."""
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
        """Gradients are reduced at each micro-batch, so that they stay sharded: no unsharded copy is held."""
        sharded: FSDPModule = model  # type: ignore[assignment]  # fully_shard made it one
        sharded.set_is_last_backward(is_last)
        yield

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        """Shard a frozen model too: it is as large as the trained one."""
        self._shard(model.requires_grad_(False).eval())
        return model


def make_mesh(group: ProcessGroup, tensor_parallel: int) -> DeviceMesh:
    """[groups, processes of a group]: processes of a group are neighbours, on one machine where it has as many."""
    # It tells at each gather of both dimensions that one collective call would be faster than two.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ranks = torch.arange(group.world_size).view(-1, tensor_parallel)
    timeout = timedelta(seconds=group.timeout_seconds)
    own: list[dist.ProcessGroup] = []
    with group.guard("the groups of the device mesh"):
        for parts in (ranks.T.tolist(), ranks.tolist()):
            made = [dist.new_group(part, timeout=timeout) for part in parts]  # every process makes all of them
            own.append(next(each for each, part in zip(made, parts, strict=True) if group.rank in part))
    return DeviceMesh.from_group(own, group.device.type, mesh=ranks, mesh_dim_names=("data", "tensor"))
