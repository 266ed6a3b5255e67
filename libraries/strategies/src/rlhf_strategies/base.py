"""Base classes of strategy plugins: process group, optimizer, saving and loading.

Weights and optimizer state are stored in full, under the parameter names of the unwrapped model, so any strategy can
load a checkpoint of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_core.components import StrategyContext
from rlhf_core.config import Section
from rlhf_core.errors import CheckpointError
from rlhf_core.place import ReduceOp, resolve_device
from rlhf_core.strategy import Strategy, TrainedModel
from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_passes import fix_products

from .checkpoint_files import CheckpointFiles
from .liger import check_liger, use_liger
from .master_adamw import MASTER, MasterAdamW
from .parts import (
    LossScale,
    ResolvedPrecision,
    check_offload,
    grouped_names,
    load_scheduler,
    make_adamw,
    resolve_precision,
    save_scheduler,
    torch_dtype,
    torch_step,
)
from .process_group import ProcessGroup
from .shards import (
    DEFAULT_SHARD_BYTES,
    group_into_shards,
    load_weights,
    local_part,
    save_weights,
    state_dict_shards_of,
    whole_tensor,
)
from .stored_weights import StoredParameter


class GroupStrategy(Strategy):
    """Rank, device and collective calls of a strategy. Subclasses prepare the models.

    Args:
        group: process group of the run, not joined yet.
    """

    passes = "rlhf_passes.fast_passes:FastPasses"
    _adamw: Callable[..., Optimizer] = staticmethod(make_adamw)
    """Factory of AdamW: torch's fused one unless the strategy requires another."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.files = CheckpointFiles()
        """Writes what `save_model` and `save_optimizer` store."""

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    @property
    def device(self) -> torch.device:
        return self.group.device

    @property
    def shards_parameters(self) -> bool:
        return False

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def gradient_average_factor(self) -> int:
        return self.world_size

    def naming_lost_peers(self) -> AbstractContextManager[Any]:
        return self.group.guard("the others")  # includes calls that a wrapped model makes itself in its forward pass

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self.group.all_reduce(tensor.to(self.device), op).to(tensor.device)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self.group.all_gather_objects(value)

    def make_optimizer(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        return self._adamw(params, lr, betas, eps, weight_decay)

    def save_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        self.run_on_main(lambda: save_scheduler(scheduler, path))

    def load_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        load_scheduler(scheduler, path)


OPTIMIZER_FILE = "optimizer.safetensors"
_GATHERED_BYTES = 64 * 1024**2
_TIMEOUT_SECONDS = 600.0
"""Timeout of strategies that lack the option `timeout_seconds`."""


@dataclass(eq=False)
class Prepared:
    """One trained model of a strategy, with information recorded before it was wrapped."""

    trained: TrainedModel
    names: list[list[str]]
    """Parameter names per parameter group, in the optimizer's order."""
    parameters: dict[str, nn.Parameter]
    """Name -> the current parameter of the unwrapped model."""
    max_grad_norm: float | None
    loss_scale: LossScale = field(default_factory=lambda: LossScale(enabled=False))


class StrategyBase(GroupStrategy):
    """Base class that handles weight and optimizer files and the step of a torch optimizer.

    Subclasses override `_wrap` (shard or wrap a model), `unwrap`, and the methods that gather and write weights. The
    plugin's component refers to the class itself as its `build`.

    Args:
        config: the `strategy:` section. Its options `precision`, `timeout_seconds` and `liger` are used if they exist.
        context: the run's context, with its device.
    """

    precision_on_cpu: ResolvedPrecision = "fp32"
    """Meaning of `precision: auto` without a GPU."""
    offload_options: tuple[str, ...] = ()
    """Options that move data between a GPU and host memory. Enabling one without a GPU is a `ConfigError`."""

    def __init__(self, config: Section, context: StrategyContext) -> None:
        fix_products(fixed=False)  # a run before this one in this process may have had `train.deterministic`
        device = resolve_device(context.device)
        super().__init__(ProcessGroup(device, getattr(config, "timeout_seconds", _TIMEOUT_SECONDS)))
        self.precision = resolve_precision(getattr(config, "precision", "fp32"), device, self.precision_on_cpu)
        check_offload(device, {name: bool(getattr(config, name)) for name in self.offload_options})
        self._uses_liger = bool(getattr(config, "liger", False))
        if self._uses_liger:
            check_liger(device)
        self._config = config
        self._prepared: list[Prepared] = []

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.compute_dtype is None else torch.autocast(self.device.type, self.compute_dtype)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return None if self.precision == "fp32" else torch_dtype(self.precision)

    def setup(self) -> None:
        self.group.join()

    def teardown(self) -> None:
        self._prepared.clear()
        self.group.leave()

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        max_grad_norm: float | None = None,
    ) -> TrainedModel:
        self._agree_on_weights(model)
        groups = grouped_names(model, optimizer)
        if self._uses_liger:
            use_liger(model)
        trained = self._wrap(model, optimizer, scheduler, max_grad_norm)
        parameters = dict(self.unwrap(trained.model).named_parameters())
        scale = LossScale(enabled=self.precision == "fp16")
        self._prepared.append(Prepared(trained, groups, parameters, max_grad_norm, scale))
        return trained

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        if self._uses_liger:
            use_liger(model)
        return super().prepare_inference(model)

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        with self.group.guard("the gradients of the other processes"):
            torch.autograd.backward(self.prepared_of(optimizer).loss_scale.applied_to(loss))

    def step(self, trained: TrainedModel) -> float:
        prepared = self.prepared_of(trained.optimizer)
        inner = self._inner_optimizer(prepared)
        with self.group.guard("the gradient norm of the other processes"):
            return torch_step(inner, trained.scheduler, prepared.max_grad_norm, prepared.loss_scale)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def state_dict_shards(
        self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        prepared = self._prepared_model(model)
        return state_dict_shards_of(
            self.unwrap(model), max_shard_bytes, only, lambda name, tensor: self._whole_weight(prepared, name, tensor)
        )

    def save_model(self, model: nn.Module, path: Path) -> None:
        shards = self.state_dict_shards(model, _GATHERED_BYTES)
        if self.is_main:  # other ranks never hold more than one gathered shard
            tensors = ((name, tensor) for shard in shards for name, tensor in shard.items())
            shards = group_into_shards(tensors, DEFAULT_SHARD_BYTES)

        error: OSError | CheckpointError | None = None
        try:
            save_weights(path, shards, write=self.is_main, files=self.files)
        except (OSError, CheckpointError) as caught:
            error = caught
            for _ in shards:  # other ranks still take part in gathering them
                pass
        for failed in self.group.all_gather_objects(error):
            if failed is not None:
                raise failed

    def load_model(self, model: nn.Module, path: Path) -> None:
        load_weights(self.unwrap(model), path, partial(self._put, self._prepared_model(model)))

    def save_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        prepared = self.prepared_of(optimizer)
        entries: dict[str, dict[str, Any]] = {}
        for name, values in self._optimizer_entries(prepared):
            if self.is_main:
                entries[name] = {key: value.cpu() if hasattr(value, "cpu") else value for key, value in values.items()}
        defaults = self._inner_optimizer(prepared).defaults
        groups = [
            {"names": names, "lr": float(group["lr"]), "changed": _changed_numbers(group, defaults)}
            for names, group in zip(prepared.names, optimizer.param_groups, strict=True)
        ]
        tree = {"groups": groups, "state": entries, "loss_scale": prepared.loss_scale.scale}
        files, file = self.files, Path(path) / OPTIMIZER_FILE
        self.run_on_main(lambda: files.write(partial(save_tree, file, files.snapshot(tree))))

    def load_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        """Call it after `load_model`, since the file also holds the master weights of 16-bit parameters."""
        prepared = self.prepared_of(optimizer)
        file = Path(path) / OPTIMIZER_FILE
        tree = load_tree(file)
        if [group["names"] for group in tree["groups"]] != prepared.names:
            raise CheckpointError(
                "contains optimizer state of other parameters, not of those that this run trains",
                where=str(file),
                hint="resume with the model, lora and algorithm settings of the run that saved it",
            )
        defaults = self._inner_optimizer(prepared).defaults
        for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
            group |= {**_numbers(defaults), "lr": saved["lr"], **saved.get("changed", {})}
        self._forget_moments(prepared)  # parameters without a step before the save lack an entry
        for name, values in tree["state"].items():
            master = values.pop(MASTER, None)
            self._put_optimizer_entry(prepared, name, values)
            if master is not None:
                with torch.no_grad():
                    self._put(prepared, name, prepared.parameters[name], master)
        prepared.loss_scale.scale = tree["loss_scale"]

    def prepared_of(self, optimizer: Optimizer) -> Prepared:
        """Find the trained model of a wrapped optimizer. Raises `ValueError` if `prepare` did not return it."""
        for prepared in self._prepared:
            if prepared.trained.optimizer is optimizer:
                return prepared
        raise ValueError("this optimizer was not returned by Strategy.prepare")

    def _prepared_model(self, model: nn.Module) -> Prepared | None:
        """The record of a trained model, None for a frozen one."""
        return next((each for each in self._prepared if each.trained.model is model), None)

    def _agree_on_weights(self, model: nn.Module) -> None:
        """Broadcast rank 0's values of weights that differ between processes: newly initialized heads and adapters.

        Weights that are still in files are the same everywhere.
        """
        if self.group.world_size == 1:
            return
        state = model.state_dict(keep_vars=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        tensors = {name: it.detach() for name, it in state.items() if not isinstance(it, StoredParameter)}
        sums = {name: float(tensor.double().sum()) for name, tensor in tensors.items()}
        all_sums = self.group.all_gather_objects((sums, shapes))
        for rank, (_, other) in enumerate(all_sums):
            if other != shapes:
                raise CheckpointError(f"ranks {rank} and {self.group.rank} built different models", where="prepare")
        with self.group.guard("rank 0's weights"), torch.no_grad():
            for name, tensor in tensors.items():
                if any(other[name] != sums[name] for other, _ in all_sums):
                    dist.broadcast(tensor, src=0)

    def _wrap(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None
    ) -> TrainedModel:
        """Shard or wrap the model. `unwrap` must return the original model."""
        return TrainedModel(model.to(self.device), optimizer, scheduler)

    def _inner_optimizer(self, prepared: Prepared) -> Optimizer:
        """The torch optimizer inside its wrappers."""
        return prepared.trained.optimizer

    def _whole_weight(self, prepared: Prepared | None, name: str, tensor: Tensor) -> Tensor:
        """The full value of a state-dict entry. Collective if weights are sharded."""
        with self.group.guard(f"the parts of {name}"):
            return whole_tensor(tensor)

    def _put_weight(self, prepared: Prepared | None, name: str, target: Tensor, value: Tensor) -> None:
        """Write this rank's part of the full `value`."""
        target.copy_(local_part(target, value))

    def _put(self, prepared: Prepared | None, name: str, target: Tensor, value: Tensor) -> None:
        """Write the full `value` to a weight and, unrounded, to its master weights if it has any."""
        self._put_weight(prepared, name, target, value)
        parameter = None if prepared is None else prepared.parameters.get(name)
        if prepared is None or parameter is None or not parameter.requires_grad:
            return
        optimizer = self._inner_optimizer(prepared)
        if isinstance(optimizer, MasterAdamW):
            optimizer.put_master(parameter, local_part(parameter, value))

    def _forget_moments(self, prepared: Prepared) -> None:
        optimizer = self._inner_optimizer(prepared)
        if isinstance(optimizer, MasterAdamW):
            optimizer.forget_moments()
        else:
            optimizer.state.clear()

    def _optimizer_entries(self, prepared: Prepared) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the full optimizer state of each parameter, by name (collective)."""
        for name, parameter in prepared.parameters.items():
            state: Mapping[str, Any] = self._inner_optimizer(prepared).state.get(parameter, {})
            if state:
                yield name, {key: self._stored_state(prepared, name, key, value) for key, value in state.items()}

    def _stored_state(self, prepared: Prepared, name: str, key: str, value: Any) -> Any:
        """A state value as written to a file: AdamW's `step` as an int, tensors in full, other values unchanged."""
        optimizer = self._inner_optimizer(prepared)
        if not isinstance(value, torch.Tensor):
            return value
        if key == "step" and isinstance(optimizer, torch.optim.AdamW):
            return int(value)
        if self.shards_parameters and value.numel() > 1 and value.shape != prepared.parameters[name].shape:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {key!r} for {name} in shape {tuple(value.shape)}, which differs "
                "from the parameter's shape: it cannot be sharded with the parameter",
                where="optimizer.name",
                hint="train with a strategy that does not shard parameters, or with optimizer: adamw",
            )
        return whole_tensor(value)

    def _put_optimizer_entry(self, prepared: Prepared, name: str, values: dict[str, Any]) -> None:
        """Restore an entry of `_optimizer_entries`, on the optimizer's device and in its layout."""
        parameter, optimizer = prepared.parameters[name], self._inner_optimizer(prepared)
        for key, value in values.items():
            if key == "step" and isinstance(optimizer, torch.optim.AdamW):
                value = torch.tensor(float(value), device=parameter.device)
            elif key != "step" and isinstance(value, torch.Tensor):
                value = local_part(parameter, value) if value.shape == parameter.shape else value.to(parameter.device)
            optimizer.state[parameter][key] = value


def _changed_numbers(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, float]:
    """Options of a parameter group, except `lr`, that the optimizer changed during training."""
    changed = {key: value for key, value in _numbers(group).items() if key in defaults and value != defaults[key]}
    return {key: value for key, value in changed.items() if key != "lr"}


def _numbers(options: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in options.items() if isinstance(value, int | float)}
