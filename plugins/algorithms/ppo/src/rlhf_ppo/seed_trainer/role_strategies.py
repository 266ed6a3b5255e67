"""The strategies of actor and critic as one: each call goes to the strategy that prepared its argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_core.errors import UserInputError
from rlhf_core.place import ReduceOp
from rlhf_core.strategy import Strategy, Trained
from rlhf_core.util import load_tree, save_tree

from .booster import BoosterAdapter, is_booster

_SCHEDULE_FILE = "scheduler.safetensors"


def check_strategy(candidate: object, *, where: str, told: str = "it is") -> None:
    """Raise `UserInputError` unless it can train a model."""
    if not isinstance(candidate, Strategy) and not is_booster(candidate):
        raise UserInputError(
            f"{told} a {type(candidate).__name__}, neither a strategy nor a ColossalAI Booster",
            where=where,
            hint="give what prepares the model: a rlhf_core.Strategy, or a colossalai.booster.Booster",
        )


def as_strategy(booster: Any, trained: Trained, *, where: str) -> Strategy:
    """A core `Strategy` as it is, a ColossalAI `Booster` behind an adapter. Raises `UserInputError` on others."""
    check_strategy(booster, where=where)
    return booster if isinstance(booster, Strategy) else BoosterAdapter(booster, trained.model, trained.optimizer)


ValueT = TypeVar("ValueT")


class RoleStrategies(Strategy):
    """`policy` and `critic`, each with the strategy that prepared it. Processes and devices are the policy's."""

    def __init__(self, strategies: Mapping[str, Strategy], trained: Mapping[str, Trained]) -> None:
        self._main = strategies["policy"]
        self.passes = self._main.passes
        self._by_id = {
            id(part): strategies[role] for role, each in trained.items() for part in (each.model, each.optimizer)
        }
        sizes = {strategy.world_size for strategy in strategies.values()}
        factors = {strategy.gradient_average_factor for strategy in strategies.values()}
        if len(sizes) > 1 or len(factors) > 1:
            raise UserInputError(
                f"actor and critic are trained by different numbers of processes: {sorted(sizes | factors)}",
                where="PPOTrainer.critic_booster",
                hint="prepare both with strategies over the same processes",
            )

    def _of(self, part: object) -> Strategy:
        return self._by_id.get(id(part), self._main)

    @property
    def rank(self) -> int:
        return self._main.rank

    @property
    def world_size(self) -> int:
        return self._main.world_size

    @property
    def is_main(self) -> bool:
        return self._main.is_main

    @property
    def num_processes(self) -> int:
        return self._main.num_processes

    def agreed(self, value: ValueT) -> ValueT:
        return self._main.agreed(value)

    @property
    def device(self) -> torch.device:
        return self._main.device

    @property
    def shards_parameters(self) -> bool:
        return self._main.shards_parameters

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self._main.parameter_dtype

    @property
    def gradient_average_factor(self) -> int:
        return self._main.gradient_average_factor

    def naming_lost_peers(self) -> AbstractContextManager[Any]:
        return self._main.naming_lost_peers()

    def autocast(self) -> AbstractContextManager[Any]:
        return self._main.autocast()

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._main.compute_dtype

    def make_optimizer(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        return self._main.make_optimizer(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        max_grad_norm: float | None = None,
    ) -> Trained:
        return self._main.prepare(model, optimizer, scheduler, max_grad_norm=max_grad_norm)

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        return self._of(model).accumulate(model, is_last)

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        self._of(optimizer).backward(loss, optimizer)

    def step(self, trained: Trained) -> float:
        return self._of(trained.optimizer).step(trained)

    def drop_gradients(self, trained: Trained) -> None:
        self._of(trained.optimizer).drop_gradients(trained)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self._main.all_reduce(tensor, op)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self._main.all_gather_objects(value)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self._of(model).unwrap(model)

    def state_dict_shards(
        self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        return self._of(model).state_dict_shards(model, max_shard_bytes, only)

    def save_model(self, model: nn.Module, path: Path) -> None:
        self._of(model).save_model(model, path)

    def load_model(self, model: nn.Module, path: Path) -> None:
        self._of(model).load_model(model, path)

    def save_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        self._of(optimizer).save_optimizer(optimizer, path)

    def load_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        self._of(optimizer).load_optimizer(optimizer, path)

    def save_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        """Save the scheduler's whole state, since a user's scheduler may be of any class."""
        if self.is_main:
            save_tree(path / _SCHEDULE_FILE, scheduler.state_dict())

    def load_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        scheduler.load_state_dict(load_tree(path / _SCHEDULE_FILE))
