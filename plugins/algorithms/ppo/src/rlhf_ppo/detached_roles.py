"""Actor and critic made ready for training, by a core `Strategy` or by a ColossalAI `Booster`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rlhf_core.errors import UserInputError
from rlhf_core.models import disable_dropout
from rlhf_core.strategies import make_adamw
from rlhf_core.strategy import Strategy, Trained

from .booster import BoosterAdapter, is_booster
from .role_strategies import RoleStrategies

_WITH_HYBRID_ADAM = ("GeminiPlugin", "LowLevelZeroPlugin")
_EPS = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """Options of AdamW, or of the strategy's replacement (HybridAdam under Gemini and LowLevelZero)."""

    actor_lr: float
    critic_lr: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float | None
    """Used by a core strategy; a Booster's plugin clips by its own options."""

    def lr(self, role: str) -> float:
        return self.actor_lr if role == "policy" else self.critic_lr


def check_strategy(made: object) -> None:
    """Raise `UserInputError` unless it can train a model."""
    if not isinstance(made, Strategy) and not is_booster(made):
        raise UserInputError(
            f"it returned a {type(made).__name__}, neither a strategy nor a ColossalAI Booster",
            where="strategy_fn",
            hint="return a rlhf_core.Strategy, or a colossalai.booster.Booster",
        )


def prepare_roles(
    made: Any, models: Mapping[str, nn.Module], options: OptimizerOptions
) -> tuple[Strategy, dict[str, Trained]]:
    """Make optimizers for both models and wrap both; also returns the strategy that trains them.

    `made` is what the seed's `strategy_fn` returned, joined already.
    """
    for model in models.values():
        disable_dropout(model)
        model.train()
    if isinstance(made, Strategy):
        return made, {role: _prepare(made, model, role, options) for role, model in models.items()}
    trained = {role: _boost(made, model, role, options) for role, model in models.items()}
    strategies: dict[str, Strategy] = {
        role: BoosterAdapter(made, each.model, each.optimizer) for role, each in trained.items()
    }
    return RoleStrategies(strategies, trained), trained


def _prepare(strategy: Strategy, model: nn.Module, role: str, options: OptimizerOptions) -> Trained:
    optimizer = strategy.make_optimizer(
        _parameters(model), lr=options.lr(role), betas=options.betas, weight_decay=options.weight_decay
    )
    return strategy.prepare(model, optimizer, max_grad_norm=options.max_grad_norm)


def _boost(booster: Any, model: nn.Module, role: str, options: OptimizerOptions) -> Trained:
    boosted, optimizer, *_ = booster.boost(model, optimizer=_booster_optimizer(booster, model, role, options))
    return Trained(boosted, optimizer, None)


def _booster_optimizer(booster: Any, model: nn.Module, role: str, options: OptimizerOptions) -> Optimizer:
    lr, betas, decay = options.lr(role), options.betas, options.weight_decay
    kinds = {kind.__name__ for kind in type(booster.plugin).__mro__}
    if kinds.isdisjoint(_WITH_HYBRID_ADAM):
        return make_adamw(_parameters(model), lr, betas, _EPS, decay)
    hybrid_adam = import_module("colossalai.nn.optimizer").HybridAdam
    made: Optimizer = hybrid_adam(_parameters(model), lr=lr, betas=betas, eps=_EPS, weight_decay=decay)
    return made


def _parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
