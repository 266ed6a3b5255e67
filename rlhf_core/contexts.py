"""Builds the contexts passed to plugins' `build`, for runs, contract suites and `rlhf plugins check` alike.

A device is resolved before a plugin sees it: it gets `cpu` or `cuda:N`, never `auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .components import (
    AlgorithmContext,
    EnvironmentContext,
    PromptsContext,
    RewardContext,
    StrategyContext,
)
from .distributed.launch_env import read_launch_env
from .place import resolve_device
from .rewards.combiner import combined_score
from .types import SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def own_device(name: str) -> torch.device:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N` to this process's device, alone or under a launcher.

    Raises `UserInputError` where there is no such GPU.
    """
    return resolve_device(name, read_launch_env().local_rank)


def strategy_context(device: str) -> StrategyContext:
    """`device`: as a run file says it."""
    return StrategyContext(device=str(own_device(device)))


def reward_context(
    device: str | torch.device, *, seed: int, model_path: str | None, folder: Path | None = None
) -> RewardContext:
    """`device`: as a run file says it, or the strategy's. `model_path`: None where there is no policy."""
    place = own_device(device) if isinstance(device, str) else device
    return RewardContext(device=str(place), seed=seed, model_path=model_path, folder=folder)


def algorithm_context(
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: SamplingParams,
    samples_per_prompt: int,
    weights: Mapping[str, float],
    clip: tuple[float, float] | None = None,
) -> AlgorithmContext:
    """`weights`: of the run's rewards, by name; `clip`: bounds of the combined score."""
    return AlgorithmContext(
        sampling=sampling,
        samples_per_prompt=samples_per_prompt,
        tokenizer=tokenizer,
        score=partial(combined_score, dict(weights), clip),
    )


def prompts_context(
    *, seed: int, base_folder: Path | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> PromptsContext:
    """`base_folder`: of relative paths; None is the working folder. `tokenizer`: the model's, where there is one."""
    return PromptsContext(
        seed=seed,
        base_folder=Path.cwd() if base_folder is None else base_folder,
        has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
    )


def environment_context(*, seed: int, base_folder: Path | None = None) -> EnvironmentContext:
    """`base_folder`: of relative paths; None is the working folder."""
    return EnvironmentContext(seed=seed, base_folder=Path.cwd() if base_folder is None else base_folder)
