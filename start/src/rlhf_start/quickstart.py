"""The quickstart: the run of `rlhf train` without a run file (group `rlhf.quickstarts`).

A tiny model is warm-started on sorting digits, then trained by the chosen algorithm. With `--environment`, both runs
are the environment's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import as_file, files
from math import prod
from typing import TYPE_CHECKING, Any

from rlhf_core.config.load import load_run
from rlhf_core.config.select import DEFAULT_PLUGINS
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins.selected import SelectedPlugin, load
from rlhf_core.plugins.trust import is_file_reference
from rlhf_core.util.did_you_mean import fold

from .stage_models import WARM_START, stage_models, value_at

if TYPE_CHECKING:
    from rlhf_core.entry.train import TrainResult

_RUNS = files("rlhf_start") / "runs"
_FIXED_SECONDS = 40.0
"""Imports, warm start, evaluations and report on two slow cores (benchmarks/learning.md)."""
_SECONDS_PER_SAMPLE = 0.0026
"""Sampling an answer and training on it once, by PPO, on the same machine."""


def base_run(algorithm: str | None, environment: str | None) -> dict[str, Any]:
    """Return the run of `rlhf train` without a run file: the last stage, before flags change it."""
    return algorithm_run(algorithm) if environment is None else environment_runs(_environment(environment))[1]


def trainer_of(run: Mapping[str, Any]) -> Callable[..., TrainResult | None] | None:
    """Return `train` with stages before it that make the run's models. None if the user chose a model."""
    first = warm_start(run)
    if value_at(run, "model.path") != first["model"]["path"]:
        return None
    from .stages import run_quickstart

    return partial(run_quickstart, first, stages=algorithm_stages(run))


def expected_minutes(run: Mapping[str, Any]) -> int | None:
    """Return the minutes that a run takes on two slow CPU cores with all of its stages.

    None if it is not the shipped run with PPO, whose number of episodes and samples may differ, in one process.
    """
    shipped = stage("ppo")
    if any(value_at(run, f"{section}.name") != shipped[section]["name"] for section in ("algorithm", "transport")):
        return None
    if value_at(run, "model.path") != shipped["model"]["path"] or value_at(run, "environment") is not None:
        return None
    sizes = [value_at(run, f"train.{size}") for size in ("episodes", "prompts_per_episode", "samples_per_prompt")]
    if not all(type(size) is int for size in sizes):
        return None
    samples: int = prod(sizes)
    return max(1, round((_FIXED_SECONDS + _SECONDS_PER_SAMPLE * samples) / 60))


def algorithm_run(algorithm: str | None) -> dict[str, Any]:
    """Return the last stage for an algorithm: its own, or the one for its kind of data."""
    if algorithm is not None and is_file_reference(algorithm):
        return stage("critic-free")
    name = fold(algorithm or DEFAULT_PLUGINS["algorithm"])
    if not _has_stage(name):
        feeds = load("algorithms", name, check_requires=False).component.feeds
        name = "dataset" if feeds == "dataset" else "critic-free"
    return stage(name)


def warm_start(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first stage of the quickstart whose last stage is `run`."""
    name = value_at(run, "environment.name")
    return environment_runs(_environment(name))[0] if isinstance(name, str) else stage(WARM_START)


def algorithm_stages(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stages in between, which make the models for the algorithm of `run` that the user did not choose."""
    options = {name: option for name, option in stage_models(run).items() if name != WARM_START and _has_stage(name)}
    stages = {name: stage(name) for name in options}
    return {name: made for name, made in stages.items() if value_at(run, options[name]) == made["model"]["path"]}


def stage(name: str) -> dict[str, Any]:
    """Return a run file of this package: `warm-start`, or a later stage."""
    with as_file(_RUNS / f"{name}.yaml") as path:
        return load_run(path)


def environment_runs(environment: SelectedPlugin) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the warm start and the run of an environment (`Component.quickstart`).

    Raises:
        ConfigError: The environment does not have them.
        PluginError: The folder or a file is missing.
    """
    target = environment.component.quickstart
    if target is None:
        raise ConfigError(
            f"{environment.label} does not have a quickstart",
            where="--environment",
            hint=f"write a run file with `model: {{path: …}}` and `environment: {environment.name}`, "
            "and run rlhf train RUN.yaml",
        )
    package, _, folder = target.partition(":")
    try:
        with as_file(files(package) / folder) as place:
            return load_run(place / "warm-start.yaml"), load_run(place / "run.yaml")
    except (ImportError, OSError, ConfigError) as error:
        raise PluginError(
            f"its quickstart {target} cannot be read: {error}", where=environment.label, hint="report to its authors"
        ) from error


def _environment(name: str) -> SelectedPlugin:
    return load("environments", name, check_requires=False)


def _has_stage(name: str) -> bool:
    return (_RUNS / f"{name}.yaml").is_file()
