"""The learner of a detached PPO trainer: actor and critic under one strategy. Does not import Ray."""

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
    """Trains on batches of samples, and saves models and optimizers. Every method is collective."""

    def __init__(
        self,
        strategy: Any,
        model_fn: Callable[[], tuple[nn.Module, nn.Module]],
        config: PPOConfig,
        *,
        lr: Mapping[str, float],
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
        micro_batch_tokens: int | None = None,
    ) -> None:
        """Join the processes, then build and prepare the models.

        Args:
            strategy: A strategy, whose `setup` is called here, or a ColossalAI Booster, whose plugin clips
                gradients by its own options.
            model_fn: Returns (actor, critic).
            config: Options of PPO.
            lr: Learning rate by role.
            betas: AdamW's betas.
            weight_decay: AdamW's weight decay.
            max_grad_norm: Maximum gradient norm of a strategy. None does not clip.
            micro_batch_tokens: Maximum tokens per forward. None uses a default for the device and models.

        Raises:
            UserInputError: `strategy` is neither, or `model_fn` does not return (actor, critic).
        """
        check_strategy(strategy, where="strategy_fn", prefix="it returned")
        is_strategy = isinstance(strategy, Strategy)
        if is_strategy:
            strategy.setup()
        with strategy.model_init_context() if is_strategy else nullcontext():
            models = _check_models(model_fn())
        make_optimizer = strategy.make_optimizer if is_strategy else partial(_optimizer_under, strategy)
        self.trained: dict[str, TrainedModel] = {}
        for role, model in models.items():
            disable_dropout(model)
            model.train()
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = make_optimizer(parameters, lr=lr[role], betas=betas, weight_decay=weight_decay)
            if is_strategy:
                self.trained[role] = strategy.prepare(model, optimizer, max_grad_norm=max_grad_norm)
            else:
                boosted, optimizer, *_ = strategy.boost(model, optimizer=optimizer)
                self.trained[role] = TrainedModel(boosted, optimizer, None)
        self.strategy: Strategy = strategy if is_strategy else _adapt(strategy, self.trained)
        self.busy = threading.Lock()
        """Held while weights change or are read."""
        self._algorithm = PPO(config)
        self._updater = Updater(self._algorithm, self.strategy, self.trained, micro_batch_tokens=micro_batch_tokens)

    def step(self, experience: Experience) -> dict[str, float]:
        """Make one update from this rank's batch and return its metrics.

        Missing advantages are computed first and whitened over the batches of all ranks, which form one update.
        """
        with self.strategy.naming_lost_peers():
            ready = self._with_advantages(experience) if experience.advantages is None else experience
            with self.busy:
                return self._updater.update(split(ready))

    def trained_names(self, role: str) -> frozenset[str]:
        """Names of the trainable parameters. Raise `UserInputError` if all are trainable (no adapter)."""
        parameters = dict(self.unwrapped(role).named_parameters())
        trained = frozenset(name for name, parameter in parameters.items() if parameter.requires_grad)
        if len(trained) == len(parameters):
            raise UserInputError(
                f"update_lora_weights is set, but the {role} is trained without a LoRA adapter",
                where="DetachedPPOTrainer",
                hint="build it with peft.get_peft_model in model_fn (trainer and maker), or unset update_lora_weights",
            )
        return trained

    def unwrapped(self, role: str) -> nn.Module:
        """The role's model without the strategy's wrapper."""
        return self.strategy.unwrap(self.trained[role].model)

    def save(self, role: str, path: Path) -> None:
        """Write the actor as a folder for transformers, LoRA merged, or the critic for `Critic.from_pretrained`."""
        save = save_actor if role == "policy" else save_critic
        with self.busy:
            save(self.strategy, self.trained[role].model, path)

    def save_optimizer(self, role: str, path: Path) -> None:
        """Write the optimizer's state, keyed by parameter name."""
        with self.busy:
            self.strategy.save_optimizer(self.trained[role].optimizer, path)

    def _with_advantages(self, experience: Experience) -> Experience:
        """Sum rewards, apply the KL penalty at each sample's own coefficient, compute GAE, whiten. Collective."""
        if not experience.rewards or experience.values is None:
            missing = "values" if experience.rewards else "rewards"
            raise UserInputError(
                f"the samples lack {missing}",
                where="DetachedPPOTrainer",
                hint="return a critic and a reward model from the makers' model_fn",
            )
        combined = RewardCombiner(dict.fromkeys(experience.rewards, 1.0)).combine(experience.rewards)
        scored = replace(experience, scores=combined.scores)
        view = replace(EpisodeView.of(scored), all_reduce=self.strategy.all_reduce)
        return self._algorithm.advantages(replace(scored, view=view))


def _check_models(returned: Any) -> Mapping[str, nn.Module]:
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or not all(isinstance(model, nn.Module) for model in returned):
        raise UserInputError(
            "must return (actor, critic)",
            where="model_fn of the detached trainer",
            hint="for example a transformers causal LM and rlhf_ppo.Critic.from_pretrained(actor)",
        )
    return {"policy": returned[0], "critic": returned[1]}


def _optimizer_under(
    booster: Any, parameters: list[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> Optimizer:
    """AdamW, or HybridAdam if the Booster's plugin requires it."""
    if {kind.__name__ for kind in type(booster.plugin).__mro__}.isdisjoint(_WITH_HYBRID_ADAM):
        return make_adamw(parameters, lr, betas, _EPS, weight_decay)
    hybrid_adam: Callable[..., Optimizer] = import_module("colossalai.nn.optimizer").HybridAdam
    return hybrid_adam(parameters, lr=lr, betas=betas, eps=_EPS, weight_decay=weight_decay)


def _adapt(booster: Any, trained: Mapping[str, TrainedModel]) -> RoleStrategies:
    adapters = {role: BoosterAdapter(booster, each.model, each.optimizer) for role, each in trained.items()}
    return RoleStrategies(adapters, trained)
