"""The learner of a detached PPO trainer: actor and critic behind one strategy. Does not import Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rlhf_core.batching import split
from rlhf_core.episode_view import EpisodeView
from rlhf_core.errors import UserInputError
from rlhf_core.rewards import RewardCombiner
from rlhf_core.strategy import Strategy, TrainedModel
from rlhf_core.training import Updater
from rlhf_core.types import Experience
from rlhf_models import disable_dropout
from rlhf_strategies import make_adamw

from ..algorithm import PPO
from ..config import PPOConfig
from .booster import BoosterAdapter
from .role_strategies import RoleStrategies, check_strategy
from .saving import save_actor, save_critic

_WITH_HYBRID_ADAM = ("GeminiPlugin", "LowLevelZeroPlugin")
_EPS = 1e-8


class DetachedLearner:
    """Trains on batches of samples, and saves. Every method is collective."""

    def __init__(
        self,
        made: Any,
        model_fn: Callable[[], tuple[nn.Module, nn.Module]],
        config: PPOConfig,
        *,
        lr: Mapping[str, float],
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
        micro_batch_tokens: int | None = None,
    ) -> None:
        """made: a strategy, which is joined here, or a ColossalAI Booster, whose plugin clips by its own options.
        lr: by role.

        Raises `UserInputError` when it is neither, or when `model_fn` gives no (actor, critic).
        """
        check_strategy(made, where="strategy_fn", told="it returned")
        is_strategy = isinstance(made, Strategy)
        if is_strategy:
            made.setup()
        with made.model_init_context() if is_strategy else nullcontext():
            models = _checked(model_fn())
        make_optimizer = made.make_optimizer if is_strategy else partial(_optimizer_under, made)
        self.trained: dict[str, TrainedModel] = {}
        for role, model in models.items():
            disable_dropout(model)
            model.train()
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = make_optimizer(parameters, lr=lr[role], betas=betas, weight_decay=weight_decay)
            if is_strategy:
                self.trained[role] = made.prepare(model, optimizer, max_grad_norm=max_grad_norm)
            else:
                boosted, optimizer, *_ = made.boost(model, optimizer=optimizer)
                self.trained[role] = TrainedModel(boosted, optimizer, None)
        self.strategy: Strategy = made if is_strategy else _adapted(made, self.trained)
        self.busy = threading.Lock()
        """Held while weights change or are read."""
        self._algorithm = PPO(config)
        self._updater = Updater(self._algorithm, self.strategy, self.trained, micro_batch_tokens=micro_batch_tokens)

    def step(self, experience: Experience) -> dict[str, float]:
        """Make one update from this rank's batch and return its metrics; missing advantages are computed first.

        They are whitened over the batches of all ranks, which form one update.
        """
        with self.strategy.naming_lost_peers():
            ready = self._with_advantages(experience) if experience.advantages is None else experience
            with self.busy:
                return self._updater.update(split(ready))

    def trained_names(self, role: str) -> frozenset[str]:
        """Names of trainable parameters. Raises `UserInputError` when all are trainable, i.e. there is no adapter."""
        parameters = dict(self.unwrapped(role).named_parameters())
        trained = frozenset(name for name, parameter in parameters.items() if parameter.requires_grad)
        if len(trained) == len(parameters):
            raise UserInputError(
                f"update_lora_weights is set, but the {role} has no LoRA adapter: all of it is trained",
                where="DetachedPPOTrainer",
                hint="build it with peft.get_peft_model in model_fn (trainer and maker), or leave update_lora_weights",
            )
        return trained

    def unwrapped(self, role: str) -> nn.Module:
        """The role's model inside what the strategy wraps it in."""
        return self.strategy.unwrap(self.trained[role].model)

    def save(self, role: str, path: Path) -> None:
        """The actor as a folder for transformers, LoRA merged; the critic as `Critic.from_pretrained` reads it."""
        save = save_actor if role == "policy" else save_critic
        with self.busy:
            save(self.strategy, self.trained[role].model, path)

    def save_optimizer(self, role: str, path: Path) -> None:
        """Write the optimizer's state under the names of the parameters."""
        with self.busy:
            self.strategy.save_optimizer(self.trained[role].optimizer, path)

    def _with_advantages(self, experience: Experience) -> Experience:
        """Sum rewards, apply the KL penalty at each sample's own coefficient, compute GAE, whiten. Collective."""
        if not experience.rewards or experience.values is None:
            missing = "values" if experience.rewards else "rewards"
            raise UserInputError(
                f"the samples carry no {missing}",
                where="DetachedPPOTrainer",
                hint="give the makers' model_fn a critic and a reward model",
            )
        combined = RewardCombiner(dict.fromkeys(experience.rewards, 1.0)).combine(experience.rewards)
        scored = replace(experience, scores=combined.scores)
        view = replace(EpisodeView.of(scored), all_reduce=self.strategy.all_reduce)
        return self._algorithm.advantages(replace(scored, view=view))


def _checked(returned: Any) -> Mapping[str, nn.Module]:
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or not all(isinstance(model, nn.Module) for model in returned):
        raise UserInputError(
            "it must return (actor, critic)",
            where="model_fn of the detached trainer",
            hint="a transformers causal LM and rlhf_ppo.Critic.from_pretrained(actor), say",
        )
    return {"policy": returned[0], "critic": returned[1]}


def _optimizer_under(
    booster: Any, parameters: list[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> Optimizer:
    """AdamW, or HybridAdam where the Booster's plugin requires it."""
    if {kind.__name__ for kind in type(booster.plugin).__mro__}.isdisjoint(_WITH_HYBRID_ADAM):
        return make_adamw(parameters, lr, betas, _EPS, weight_decay)
    hybrid_adam: Callable[..., Optimizer] = import_module("colossalai.nn.optimizer").HybridAdam
    return hybrid_adam(parameters, lr=lr, betas=betas, eps=_EPS, weight_decay=weight_decay)


def _adapted(booster: Any, trained: Mapping[str, TrainedModel]) -> RoleStrategies:
    adapters = {role: BoosterAdapter(booster, each.model, each.optimizer) for role, each in trained.items()}
    return RoleStrategies(adapters, trained)
