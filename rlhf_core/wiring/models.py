"""A run's strategy and models: loaded for a place, and prepared for training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from ..algorithm import Algorithm, FrozenModel, RolloutAlgorithm
from ..components import OptimizerContext, ScheduleContext, StrategyContext
from ..config.resolve import ResolvedRun
from ..config.resolved import Configured
from ..config.sections import ModelConfig, OptimizerConfig, TrainConfig
from ..errors import PluginError, UserInputError
from ..models.kinds import model_kind_for
from ..place import Place, resolve_device
from ..strategy import Strategy, TrainedModel
from ..types import Role
from .inputs import RunInputs

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


def build_strategy(resolved: ResolvedRun) -> Strategy:
    """Return the strategy of the run. Its process group is not joined yet.

    Args:
        resolved: the run.
    """
    context = StrategyContext(str(resolve_device(resolved.run.model.device)))
    return cast(Strategy, resolved.strategy.build(resolved.strategy.config, context))


def model_dtype(resolved: ResolvedRun, place: Place) -> torch.dtype:
    """Return `model.dtype` as a torch dtype. `auto` is the dtype of the place's parameters.

    Args:
        resolved: the run.
        place: the processes and device that hold the model.
    """
    return _dtype(resolved.run.model.dtype, place.parameter_dtype)


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    import torch

    return default if name == "auto" else cast("torch.dtype", getattr(torch, name))


def load_start_policy(resolved: ResolvedRun, place: Place) -> nn.Module:
    """Load another copy of the start policy: a reference, or a module that receives the trained weights."""
    kind = model_kind_for(resolved.run.model)
    return kind.load_policy(dtype=model_dtype(resolved, place), seed=resolved.run.train.seed)


def load_models(inputs: RunInputs, place: Place, *, trains: bool = False) -> dict[Role, nn.Module]:
    """Load the policy and, if the algorithm has one, make the critic. trains: disable the noise of training mode."""
    from torch.nn.modules.dropout import _DropoutNd

    resolved, algorithm = inputs.resolved, inputs.algorithm
    kind, dtype = model_kind_for(resolved.run.model, algorithm.model_kind), model_dtype(resolved, place)
    with place.model_init_context():
        policy = kind.load_policy(dtype=dtype, seed=resolved.run.train.seed, tokenizer=inputs.tokenizer)
        if trains:  # a ratio compares one function with itself, while a dataset may be learned with adapter dropout
            kind.disable_noise(policy, adapters=isinstance(algorithm, RolloutAlgorithm))
        models: dict[Role, nn.Module] = {"policy": policy}
        if "critic" in algorithm.roles:
            models["critic"] = algorithm.build_critic(policy)
            for module in models["critic"].modules():  # also the critic's own, so that rollout and update values agree
                if isinstance(module, _DropoutNd):
                    module.p = 0.0
    return models


def check_frozen(algorithm: Algorithm[Any, Any], tokenizer: Any) -> None:
    """Raise `UserInputError` if a frozen model is invalid, or its tokens must be those of `tokenizer` and differ."""
    for role, frozen in getattr(algorithm, "frozen_models", {}).items():
        with _of_role(role):
            (kind := model_kind_for(ModelConfig(path=frozen.path))).check()
            if not frozen.own_tokenizer:
                kind.check_tokens(tokenizer)


def place_frozen(role: Role, frozen: FrozenModel, place: Place, *, dtype: torch.dtype, seed: int) -> nn.Module:
    """Load and place a frozen model that the algorithm declares, such as a teacher. dtype: used for `auto`."""
    with _of_role(role), place.model_init_context():
        model = model_kind_for(ModelConfig(path=frozen.path)).load_policy(dtype=_dtype(frozen.dtype, dtype), seed=seed)
    return place.prepare_inference(model)


@contextmanager
def _of_role(role: Role) -> Iterator[None]:
    """Context whose errors are about the model of a role of the algorithm."""
    try:
        yield
    except UserInputError as error:
        raise UserInputError(error.message, where=f"algorithm.{role}.path", hint=error.hint) from error


def prepare(resolved: ResolvedRun, role: Role, model: nn.Module, strategy: Strategy) -> TrainedModel:
    """Return the model with its optimizer and schedule, as the strategy trains it."""
    model.train()
    options, train = resolved.optimizer.typed(OptimizerConfig), resolved.run.train
    optimizer = make_optimizer(resolved, role, model, strategy)
    per_episode = updates_per_episode(train)
    scheduler = make_scheduler(
        optimizer,
        resolved.schedule,
        warmup_updates=options.warmup_episodes * per_episode,
        total_updates=train.episodes * per_episode,
    )
    return strategy.prepare(model, optimizer, scheduler, max_grad_norm=options.max_grad_norm)


def updates_per_episode(train: TrainConfig) -> int:
    """Return the optimizer steps of an episode in which no sample is dropped."""
    return train.epochs_per_episode * math.ceil(train.samples_per_episode / train.train_batch_size)


def make_optimizer(resolved: ResolvedRun, role: str, model: nn.Module, strategy: Strategy) -> Optimizer:
    """Return the optimizer of the trained parameters of `model`, before a strategy wraps it.

    Raises `PluginError` if it omits parameters or already has state, since a strategy may still replace parameters.
    """
    options = (selected := resolved.optimizer).typed(OptimizerConfig)
    lr = options.critic_lr if role == "critic" and options.critic_lr is not None else options.lr
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    context = OptimizerContext(parameters=parameters, lr=lr, strategy=strategy)
    optimizer: Optimizer = selected.build(selected.config, context)
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    problem = None
    if held != {id(each) for each in parameters.values()}:
        problem = "does not hold exactly the parameters that it was passed"
    elif any(optimizer.state.values()):
        problem = "has state before its first step, which is lost if the strategy shards or moves the parameters"
    if problem is not None:
        raise PluginError(f"its optimizer {problem}", where=selected.label, hint="report this to the plugin's authors")
    return optimizer


def make_scheduler(optimizer: Optimizer, schedule: Configured, *, warmup_updates: int, total_updates: int) -> LambdaLR:
    """Return a scheduler to step once per update: linear warm-up from above 0, then the factors of `schedule`."""
    from torch.optim.lr_scheduler import LambdaLR

    context = ScheduleContext(warmup_updates=warmup_updates, total_updates=total_updates)
    after_warmup: Any = schedule.build(schedule.config, context)

    def factor(update: int) -> float:
        if update < warmup_updates:
            return (update + 1) / warmup_updates
        value = float(after_warmup(update))
        if not (math.isfinite(value) and value >= 0):
            raise PluginError(f"its factor for update {update} is {value}", where=schedule.label)
        return value

    return LambdaLR(optimizer, factor)
