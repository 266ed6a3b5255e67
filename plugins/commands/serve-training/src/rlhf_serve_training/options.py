"""Options of the ranks, and refusals of those that the service does not support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from rlhf_core.config import ModelConfig
from rlhf_core.errors import UserInputError
from rlhf_core.plugins import load

from .adapters import ALPHA

WHERE = "rlhf serve-training"
_DTYPES = ("auto", "float32", "bfloat16")
SWAPPING = ("single", "torch-ddp", "ddp", "fsdp")
"""Strategies whose parameters can be replaced between two steps."""
OWNING = ("gemini", "low-level-zero")
"""Strategies whose optimizer owns the parameters, so that there is one adapter."""


@dataclass(frozen=True)
class WorkerOptions:
    """Options of every rank, as JSON values."""

    base: str
    strategy: str = "single"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "hf"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    dtype: str = "auto"
    max_rank: int = 32
    seed: int = 0
    micro_batch_tokens: int | None = None
    gradient_checkpointing: bool = False
    max_adapters: int = 16

    @property
    def is_owning(self) -> bool:
        """Whether the strategy holds one adapter only."""
        return self.strategy in OWNING


def check_strategy(options: WorkerOptions, num_processes: int) -> None:
    """Raise `UserInputError` if the service cannot use the strategy, or not with as many adapters."""
    if options.dtype not in _DTYPES:
        raise UserInputError(
            f"{options.dtype!r} is not a dtype of the model",
            where="--set model.dtype",
            hint=f"use {', '.join(_DTYPES)}",
        )
    if options.strategy in OWNING and options.max_adapters > 1:
        raise UserInputError(
            f"{options.strategy} holds one adapter, not {options.max_adapters}: its optimizer owns the parameters",
            where="--max-adapters",
            hint=f"leave it out, or use one of {', '.join(SWAPPING)}",
        )
    if options.strategy not in (*SWAPPING, *OWNING):
        raise UserInputError(
            f"the strategy {options.strategy!r} is not supported by the service",
            where="--strategy",
            hint=f"use one of {', '.join((*SWAPPING, *OWNING))}",
        )
    if options.strategy == "single" and num_processes > 1:
        raise UserInputError(
            f"`single` trains in one process, not in {num_processes}",
            where="--num-processes",
            hint="add --strategy torch-ddp (or fsdp)",
        )
    if options.strategy_options.get("tensor_parallel", 1) > 1:
        raise UserInputError("tensor_parallel is not supported by the service", where="--set strategy.tensor_parallel")


def plugin_of(kind: str, section: str, name: str, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return an installed plugin (`rlhf_core.plugins.load`) and its options, an instance of its config.

    Args:
        kind: kind of the plugin, such as `engines`.
        section: its section in `--set`, such as `engine`.
        name: its name.
        values: its options.

    Raises:
        PluginError: the plugin is not installed or broken.
        UserInputError: an option is unknown or not valid.
    """
    selected = load(kind, name)
    try:
        return selected, selected.component.config.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        known = ", ".join(selected.component.config.model_fields)
        key = ".".join(map(str, (section, *first["loc"])))
        raise UserInputError(first["msg"], where=f"--set {key}", hint=f"{name} has {known}") from None


def model_config(options: WorkerOptions) -> ModelConfig:
    """Return the section `model` of a run with the slot's adapter.

    Args:
        options: options of the ranks.
    """
    return ModelConfig.model_validate(
        {
            "path": options.base,
            "lora": {"r": options.max_rank, "alpha": ALPHA},
            "gradient_checkpointing": options.gradient_checkpointing,
        }
    )
