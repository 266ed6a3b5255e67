"""Combine the strategies of actor and critic: each call goes to the strategy that prepared its argument."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_core.errors import UserInputError
from rlhf_core.strategy import Strategy, TrainedModel
from rlhf_core.util import load_tree, save_tree

from .booster import BoosterAdapter, is_booster

_SCHEDULE_FILE = "scheduler.safetensors"


def check_strategy(candidate: object, *, where: str, prefix: str = "it is") -> None:
    """Raise `UserInputError` unless the object can train a model. `prefix` starts the message."""
    if not isinstance(candidate, Strategy) and not is_booster(candidate):
        raise UserInputError(
            f"{prefix} a {type(candidate).__name__}, neither a strategy nor a ColossalAI Booster",
            where=where,
            hint="pass the object that prepares the model: a rlhf_core.Strategy, or a colossalai.booster.Booster",
        )


def as_strategy(booster: Any, trained: TrainedModel, *, where: str) -> Strategy:
    """Return a core `Strategy` unchanged, and wrap a ColossalAI `Booster` in an adapter.

    Raises:
        UserInputError: The object is neither.
    """
    check_strategy(booster, where=where)
    return booster if isinstance(booster, Strategy) else BoosterAdapter(booster, trained.model, trained.optimizer)


def _main(name: str) -> Any:
    """Property that returns an attribute or method of the policy's strategy."""
    return property(lambda self: getattr(self.main, name))


def _by_argument(name: str) -> Any:
    """Method of the strategy that prepared its first argument, a model or an optimizer."""

    def method(self: RoleStrategies, part: object, *args: Any, **options: Any) -> Any:
        return getattr(self.of(part), name)(part, *args, **options)

    return method


class RoleStrategies(Strategy):
    """`policy` and `critic`, each with the strategy that prepared it. Processes and devices are the policy's."""

    def __init__(self, strategies: Mapping[str, Strategy], trained: Mapping[str, TrainedModel]) -> None:
        self.main = strategies["policy"]
        self.passes = self.main.passes
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

    def of(self, part: object) -> Strategy:
        """The strategy that prepared a model or an optimizer."""
        return self._by_id.get(id(part), self.main)

    rank = _main("rank")
    world_size = _main("world_size")
    is_main = _main("is_main")
    num_processes = _main("num_processes")
    agreed = _main("agreed")
    device = _main("device")
    shards_parameters = _main("shards_parameters")
    parameter_dtype = _main("parameter_dtype")
    compute_dtype = _main("compute_dtype")
    gradient_average_factor = _main("gradient_average_factor")
    naming_lost_peers = _main("naming_lost_peers")
    autocast = _main("autocast")
    make_optimizer = _main("make_optimizer")
    prepare = _main("prepare")
    all_reduce = _main("all_reduce")
    all_gather_objects = _main("all_gather_objects")

    accumulate = _by_argument("accumulate")
    unwrap = _by_argument("unwrap")
    state_dict_shards = _by_argument("state_dict_shards")
    save_model = _by_argument("save_model")
    load_model = _by_argument("load_model")
    save_optimizer = _by_argument("save_optimizer")
    load_optimizer = _by_argument("load_optimizer")

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        self.of(optimizer).backward(loss, optimizer)

    def step(self, trained: TrainedModel) -> float:
        return self.of(trained.optimizer).step(trained)

    def drop_gradients(self, trained: TrainedModel) -> None:
        self.of(trained.optimizer).drop_gradients(trained)

    def save_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        """Save the scheduler's whole state, because a user's scheduler may be of any class."""
        if self.is_main:
            save_tree(path / _SCHEDULE_FILE, scheduler.state_dict())

    def load_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        scheduler.load_state_dict(load_tree(path / _SCHEDULE_FILE))
