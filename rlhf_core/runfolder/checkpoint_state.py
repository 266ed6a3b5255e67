"""The state in a run's checkpoint, in addition to the strategy's files."""

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
    """Number of updates made."""
    next_episode: int
    policy_version: int
    eval_before: float | None
    algorithm: dict[str, Any]
    """`Algorithm.state_dict`, for example of a KL controller."""
    combiner: dict[str, Any]
    """Running normalization of rewards."""
    wall_s: float
    """Wall time of all sessions of the run so far, in seconds."""
    lr_factors: dict[str, float] = field(default_factory=dict)
    """Role -> factor on its learning rates, if guards or the user have changed them."""
    settings: dict[str, float] = field(default_factory=dict)
    """Options of the algorithm that the user has changed during the run."""
    rollbacks: int = 0
    """Number of rollbacks of the run."""
    num_samples: int | None = None
    """Lines of `samples.jsonl`. None in a checkpoint of an earlier version, which did not count them."""
    best_step: int | None = None
    best_value: float | None = None
    """The best checkpoint so far and its metric, if `checkpoint.best` is set."""
    finished: dict[str, Any] | None = None
    """Why the run was done before its last episode: `guard`, `reason`, and the `options` that caused it."""


def save_run_state(
    folder: Path,
    state: RunState,
    channel: Mapping[str, Any] | None,
    trained: Mapping[str, TrainedModel],
    strategy: Strategy,
    plugins: Mapping[str, Any] | None = None,
) -> None:
    """Write models, optimizers, schedules and counters into `folder`. Collective: all ranks call it.

    Args:
        folder: the checkpoint.
        state: counters of the run.
        channel: state of the rollout channel, see `load_channel_state`. None if the run learns from a dataset.
        trained: role -> trained model.
        strategy: writes the models.
        plugins: state of hook plugins and rewards, by name.
    """
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
    """Restore models, optimizers and schedules from a checkpoint. Collective: all ranks call it.

    Args:
        folder: the checkpoint.
        trained: role -> model to restore.
        strategy: reads the models.

    Returns:
        The counters of the run.

    Raises:
        CheckpointError: the checkpoint lacks one of the models, or cannot be read.
    """
    state = read_run_state(folder)
    for role, model in trained.items():
        if not (folder / role).is_dir():
            raise CheckpointError(
                f"does not contain {role}", where=str(folder), hint="resume with the algorithm that wrote it"
            )
        strategy.load_model(model.model, folder / role)
        strategy.load_optimizer(model.optimizer, folder / f"{role}-optimizer")
        if model.scheduler is not None:
            strategy.load_lr_scheduler(model.scheduler, folder / f"{role}-schedule")
    return state


def read_run_state(folder: Path) -> RunState:
    """Read the counters of the checkpoint `folder`. Raises `CheckpointError` if they cannot be read."""
    try:
        return RunState(**json.loads((folder / _STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {_STATE}: {error}", where=str(folder)) from error


def load_channel_state(folder: Path) -> dict[str, Any] | None:
    """Read the state of the rollout channel: prompt cursor, ledger and finished groups.

    Args:
        folder: the checkpoint.

    Returns:
        The state, or None if the run learns from a dataset.
    """
    path = folder / _CHANNEL
    return load_tree(path) if path.exists() else None


def load_plugin_state(folder: Path) -> dict[str, Any]:
    """Read the state of plugins in the checkpoint, {} if it does not contain any."""
    path = folder / _PLUGINS
    return load_tree(path) if path.exists() else {}
