"""The arguments of `PPOTrainer` in groups, and their checks before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import nn

from rlhf_core.errors import UserInputError
from rlhf_core.strategy import TrainedModel
from rlhf_core.types import SamplingParams
from rlhf_models import is_lora

from ..config import PPOConfig
from .booster import tensor_parallel_size
from .role_strategies import RoleStrategies, as_strategy

_WHERE = "PPOTrainer"
_PARAMETERS = {"clip_eps": "eps_clip", "aggregation": "apply_loss_mask"}
"""Option -> its name among the seed's parameters."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models, and the boosters that prepared the trained ones."""

    actor_booster: Any
    critic_booster: Any
    actor: nn.Module
    critic: nn.Module
    reward: Any
    initial: nn.Module | None

    def strategy(self, trained: dict[str, TrainedModel], kl_coef: float) -> RoleStrategies:
        """Both boosters as one strategy. Raises `UserInputError` if either is not a booster or strategy, and for a KL
        penalty without a reference.
        """
        actor = as_strategy(self.actor_booster, trained["policy"], where=f"{_WHERE}.actor_booster")
        critic = as_strategy(self.critic_booster, trained["critic"], where=f"{_WHERE}.critic_booster")
        strategy = RoleStrategies({"policy": actor, "critic": critic}, trained)
        lora = is_lora(strategy.unwrap(self.actor))
        same = self.initial is self.actor
        if kl_coef > 0 and not lora and (self.initial is None or same):
            what = "is the actor itself" if same else "is None and the actor has no LoRA adapter to switch off"
            raise UserInputError(
                f"kl_coef is {kl_coef}, but initial_model {what}",
                where=f"{_WHERE}.initial_model",
                hint="give a copy of the start policy (copy.deepcopy before training), or kl_coef=0.0",
            )
        return strategy


def config_of(
    options: PPOConfig | None, parameters: Mapping[str, float | None], *, ptx_coef: float, apply_loss_mask: bool
) -> PPOConfig:
    """The algorithm's options, with the seed's parameters under their names here. Raises `UserInputError`."""
    options = options or PPOConfig()
    pretraining = options.model_fields_set & {"ptx_path", "ptx_coef", "ptx_max_tokens"}
    if pretraining:
        raise UserInputError(
            f"{', '.join(sorted(pretraining))}: pretraining text comes with fit",
            where=f"{_WHERE}.options",
            hint="give the trainer ptx_coef=…, and fit a pretrain_dataloader=…",
        )
    if not 0 <= ptx_coef < 1:
        raise UserInputError(f"must be at least 0 and below 1, got {ptx_coef}", where=f"{_WHERE}.ptx_coef")
    given: dict[str, Any] = dict(parameters)
    if not apply_loss_mask:
        given["aggregation"] = "sequence-mean-token-sum-norm"
    for name in sorted(options.model_fields_set & given.keys()):
        own = getattr(options, name)
        if own != given[name]:
            parameter = _PARAMETERS.get(name, name)
            raise UserInputError(
                f"{name} is {own!r} here, but the trainer's own {parameter} says {given[name]!r}",
                where=f"{_WHERE}.options",
                hint=f"leave {name} out of the options, and give the trainer {parameter}=…",
            )
    try:
        config = PPOConfig.model_validate({**options.model_dump(), **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserInputError(
            f"{first['msg']}, got {first['input']!r}", where=f"{_WHERE}.{_PARAMETERS.get(name, name)}"
        ) from None
    return config.model_copy(update={"ptx_coef": ptx_coef})


@dataclass(frozen=True, slots=True)
class Batching:
    """How collected samples become updates."""

    train_batch_size: int
    """Samples that run forward together, on each trainer."""
    accumulation_steps: int
    """Batches in one optimizer step."""
    buffer_cpu_offload: bool
    sample_buffer: bool


@dataclass(frozen=True, slots=True)
class Rollouts:
    """How answers are made."""

    sampling: SamplingParams
    engine: str
    samples_per_prompt: int
    seed: int
    offload_inference_models: bool


def check_numbers(batching: Batching, rollouts: Rollouts, save_interval: int, save_dir: str | None) -> None:
    """Check the bounds of counts. Raises `UserInputError`."""
    at_least = {
        "train_batch_size": (batching.train_batch_size, 1),
        "accumulation_steps": (batching.accumulation_steps, 1),
        "samples_per_prompt": (rollouts.samples_per_prompt, 1),
        "save_interval": (save_interval, 0),
    }
    for name, (value, lowest) in at_least.items():
        if value < lowest:
            raise UserInputError(f"must be at least {lowest}, got {value}", where=f"{_WHERE}.{name}")
    if save_interval > 0 and save_dir is None:
        raise UserInputError(
            f"save_interval is {save_interval}, but there is no folder to save to",
            where=f"{_WHERE}.save_dir",
            hint='save_dir="./checkpoints"',
        )


def check_tensor_parallel(use_tp: bool, *boosters: object) -> None:
    """Raise `UserInputError` where tensor parallelism is requested or on: it is not supported."""
    sizes = [tensor_parallel_size(booster) for booster in boosters]
    if max(sizes) > 1:
        raise UserInputError(
            f"its plugin shares each layer among {max(sizes)} processes, which rollouts cannot be made with",
            where=f"{_WHERE}.actor_booster",
            hint="use a data-parallel plugin (TorchDDP, LowLevelZero, Gemini), or tp_size=1",
        )
    if use_tp:
        raise UserInputError(
            "use_tp is True, but no booster has a tensor-parallel plugin",
            where=f"{_WHERE}.use_tp",
            hint="use_tp=False",
        )
