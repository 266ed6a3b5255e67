"""Group and check the arguments of `PPOTrainer` before anything is built."""

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
"""Option of PPO and its name among ColossalChat's parameters."""


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
        """Combine both boosters into one strategy.

        Raises:
            UserInputError: One is neither a booster nor a strategy, or a KL penalty is set without a reference.
        """
        actor = as_strategy(self.actor_booster, trained["policy"], where=f"{_WHERE}.actor_booster")
        critic = as_strategy(self.critic_booster, trained["critic"], where=f"{_WHERE}.critic_booster")
        strategy = RoleStrategies({"policy": actor, "critic": critic}, trained)
        lora = is_lora(strategy.unwrap(self.actor))
        same = self.initial is self.actor
        if kl_coef > 0 and not lora and (self.initial is None or same):
            detail = "is the actor itself" if same else "is None and the actor does not use a LoRA adapter"
            raise UserInputError(
                f"kl_coef is {kl_coef}, but initial_model {detail}",
                where=f"{_WHERE}.initial_model",
                hint="pass a copy of the initial policy (copy.deepcopy before training), or kl_coef=0.0",
            )
        return strategy


def config_of(
    options: PPOConfig | None, parameters: Mapping[str, float | None], *, ptx_coef: float, apply_loss_mask: bool
) -> PPOConfig:
    """Merge the algorithm's options with ColossalChat's parameters.

    Raises:
        UserInputError: A value is invalid, or an option contradicts a parameter.
    """
    options = options or PPOConfig()
    pretraining = options.model_fields_set & {"ptx_path", "ptx_coef", "ptx_max_tokens"}
    if pretraining:
        raise UserInputError(
            f"{', '.join(sorted(pretraining))}: pretraining text is an argument of fit",
            where=f"{_WHERE}.options",
            hint="pass ptx_coef=… to the trainer, and pretrain_dataloader=… to fit",
        )
    if "critic" in options.model_fields_set:
        raise UserInputError(
            "critic: the critic is an argument of the trainer",
            where=f"{_WHERE}.options",
            hint="pass critic=Critic.from_pretrained(…) to the trainer",
        )
    if options.reference_every is not None or options.reference_mix != 1.0:
        raise UserInputError(
            "reference_every, reference_mix: the reference is an argument of the trainer, which does not change it",
            where=f"{_WHERE}.options",
            hint="use the algorithm ppo of a run file, or load new weights into initial_model in a callback",
        )
    if not 0 <= ptx_coef < 1:
        raise UserInputError(f"must be at least 0 and below 1, got {ptx_coef}", where=f"{_WHERE}.ptx_coef")
    values: dict[str, Any] = dict(parameters)
    if not apply_loss_mask:
        values["aggregation"] = "sequence-mean-token-sum-norm"
    for name in sorted(options.model_fields_set & values.keys()):
        option = getattr(options, name)
        if option != values[name]:
            parameter = _PARAMETERS.get(name, name)
            raise UserInputError(
                f"{name} is {option!r} here, but the trainer's own {parameter} is {values[name]!r}",
                where=f"{_WHERE}.options",
                hint=f"omit {name} from the options, and pass {parameter}=… to the trainer",
            )
    try:
        config = PPOConfig.model_validate({**options.model_dump(exclude_unset=True), **values})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserInputError(
            f"{first['msg']}, got {first['input']!r}", where=f"{_WHERE}.{_PARAMETERS.get(name, name)}"
        ) from None
    return config.model_copy(update={"ptx_coef": ptx_coef})


@dataclass(frozen=True, slots=True)
class Batching:
    """Split of collected samples into updates."""

    train_batch_size: int
    """Samples per forward, on each trainer."""
    accumulation_steps: int
    """Batches per optimizer step."""
    buffer_cpu_offload: bool
    sample_buffer: bool


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Settings for sampling answers."""

    sampling: SamplingParams
    engine: str
    samples_per_prompt: int
    seed: int
    offload_inference_models: bool


def check_numbers(batching: Batching, rollouts: Rollouts, save_interval: int, save_dir: str | None) -> None:
    """Check the bounds of counts. Raise `UserInputError` if one is violated."""
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
            f"save_interval is {save_interval}, but save_dir is None",
            where=f"{_WHERE}.save_dir",
            hint='save_dir="./checkpoints"',
        )


def check_tensor_parallel(use_tp: bool, *boosters: object) -> None:
    """Raise `UserInputError` if tensor parallelism is requested or enabled, since it is not supported."""
    sizes = [tensor_parallel_size(booster) for booster in boosters]
    if max(sizes) > 1:
        raise UserInputError(
            f"its plugin splits each layer over {max(sizes)} processes, which rollouts do not support",
            where=f"{_WHERE}.actor_booster",
            hint="use a data-parallel plugin (TorchDDP, LowLevelZero, Gemini), or tp_size=1",
        )
    if use_tp:
        raise UserInputError(
            "use_tp is True, but neither booster has a tensor-parallel plugin",
            where=f"{_WHERE}.use_tp",
            hint="use_tp=False",
        )
