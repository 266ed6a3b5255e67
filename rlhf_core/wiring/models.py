"""A run's strategy and models: loaded for a place, and prepared for training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from ..algorithm import RolloutAlgorithm
from ..components import StrategyContext
from ..config.resolve import ResolvedRun
from ..config.sections import OptimizerConfig, TrainConfig
from ..models.forward_passes import passes_of
from ..models.loading import disable_dropout, load_policy
from ..optimizers.making import make_optimizer, make_scheduler
from ..place import Place, resolve_device
from ..strategy import Strategy, Trained
from ..types import Role
from .inputs import RunInputs

if TYPE_CHECKING:
    import torch
    from torch import nn


def build_strategy(resolved: ResolvedRun) -> Strategy:
    """The strategy of the run; its process group is not joined yet."""
    context = StrategyContext(str(resolve_device(resolved.run.model.device)))
    return cast(Strategy, resolved.strategy.build(resolved.strategy.config, context))


def model_dtype(resolved: ResolvedRun, place: Place) -> torch.dtype:
    """`model.dtype`; `auto` is the type of the place's parameters."""
    import torch

    name = resolved.run.model.dtype
    return place.parameter_dtype if name == "auto" else cast("torch.dtype", getattr(torch, name))


def load_start_policy(resolved: ResolvedRun, place: Place) -> nn.Module:
    """Another copy of the start policy: a reference, or a module that takes the trained weights."""
    return load_policy(resolved.run.model, dtype=model_dtype(resolved, place), seed=resolved.run.train.seed)


def load_models(inputs: RunInputs, place: Place, *, trains: bool = False) -> dict[Role, nn.Module]:
    """Load the policy and, if the algorithm has one, make the critic. trains: without the noise of training mode."""
    resolved, algorithm = inputs.resolved, inputs.algorithm
    with place.model_init_context():
        policy = load_policy(
            resolved.run.model,
            dtype=model_dtype(resolved, place),
            seed=resolved.run.train.seed,
            tokenizer=inputs.tokenizer,
            kind=algorithm.model_kind,
        )
        if trains:
            passes_of(place).disable_noise(policy)
        models: dict[Role, nn.Module] = {"policy": policy}
        if "critic" in algorithm.roles:
            models["critic"] = algorithm.build_critic(policy)
        if isinstance(algorithm, RolloutAlgorithm):  # the adapters' too: a ratio compares one function with itself
            for model in models.values():
                disable_dropout(model)
    return models


def prepare(resolved: ResolvedRun, role: Role, model: nn.Module, strategy: Strategy) -> Trained:
    """The model with its optimizer and schedule, as the strategy trains it."""
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
    """Optimizer steps of an episode in which no sample is dropped."""
    return train.epochs_per_episode * math.ceil(train.samples_per_episode / train.train_batch_size)
