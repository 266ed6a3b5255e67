"""The state in a run's checkpoint, beside the strategy's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..strategy import Strategy, TrainedModel
from ..util.tensor_files import load_tree, save_tree

_STATE = "state.json"
_CHANNEL = "channel.safetensors"
_PLUGINS = "plugins.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run between two episodes."""

    step: int
    """Updates made."""
    next_episode: int
    policy_version: int
    eval_before: float | None
    algorithm: dict[str, Any]
    """`Algorithm.state_dict` (a KL controller, say)."""
    combiner: dict[str, Any]
    """Running normalisation of rewards."""
    wall_s: float
    """Wall time of all sessions of the run so far, in seconds."""
    lr_factors: dict[str, float] = field(default_factory=dict)
    """Role -> factor on its learning rates, where guards or the user have changed them."""
    settings: dict[str, float] = field(default_factory=dict)
    """Options of the algorithm that the user has changed during the run."""
    rollbacks: int = 0
    """Times the run was rolled back."""
    num_samples: int | None = None
    """Lines of `samples.jsonl`; None in a checkpoint of an earlier version, which did not count them."""
    best_step: int | None = None
    best_value: float | None = None
    """The best checkpoint so far and its metric, where `checkpoint.best` names one."""
    finished: dict[str, Any] | None = None
    """Why the run was done before its last episode: `guard`, `reason`, and the `options` that led to it."""


def save_run_state(
    folder: Path,
    state: RunState,
    channel: Mapping[str, Any] | None,
    trained: Mapping[str, TrainedModel],
    strategy: Strategy,
    plugins: Mapping[str, Any] | None = None,
) -> None:
    """Collective. Write models, optimizers, schedules and counters into `folder`; `plugins`: what plugins keep."""
    for role, model in trained.items():
        strategy.save_model(model.model, folder / role)
        strategy.save_optimizer(model.optimizer, folder / f"{role}-optimizer")
        if model.scheduler is not None:
            strategy.save_lr_scheduler(model.scheduler, folder / f"{role}-schedule")

    def write_counters() -> None:
        (folder / _STATE).write_text(json.dumps(asdict(state), indent=1))
        if channel is not None:
            save_tree(folder / _CHANNEL, channel)
        if plugins:
            save_tree(folder / _PLUGINS, plugins)

    strategy.run_on_main(write_counters)


def load_run_state(folder: Path, trained: Mapping[str, TrainedModel], strategy: Strategy) -> RunState:
    """Collective. Restore models, optimizers and schedules."""
    state = read_run_state(folder)
    for role, model in trained.items():
        if not (folder / role).is_dir():
            raise CheckpointError(
                f"holds no {role}", where=str(folder), hint="resume with the algorithm that wrote the checkpoint"
            )
        strategy.load_model(model.model, folder / role)
        strategy.load_optimizer(model.optimizer, folder / f"{role}-optimizer")
        if model.scheduler is not None:
            strategy.load_lr_scheduler(model.scheduler, folder / f"{role}-schedule")
    return state


def read_run_state(folder: Path) -> RunState:
    """The counters of the checkpoint `folder`. Raises `CheckpointError` where they cannot be read."""
    try:
        return RunState(**json.loads((folder / _STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {_STATE}: {error}", where=str(folder)) from error


def load_channel_state(folder: Path) -> dict[str, Any] | None:
    """Prompt cursor, ledger and finished groups; None for a run fed by a dataset."""
    path = folder / _CHANNEL
    return load_tree(path) if path.exists() else None


def load_plugin_state(folder: Path) -> dict[str, Any]:
    """State of plugins in the checkpoint, {} where there is none."""
    path = folder / _PLUGINS
    return load_tree(path) if path.exists() else {}
