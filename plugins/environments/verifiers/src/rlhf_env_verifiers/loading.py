"""Loads the configuration and tasks of a verifiers environment from its options."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError

from rlhf_core.errors import ConfigError, first_line
from rlhf_core.util import printable

from .config import VerifiersConfig

_loading = threading.Lock()
"""Held while loading: episodes start on several threads, and one of them loads for all."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded environment, shared by its episodes and never modified."""

    config: vf.EnvConfig
    """Configuration for `load_environment`, of the environment's own type."""
    seat: str
    """The environment's name for its one agent, the policy."""
    tasks: tuple[Any, ...]


def load(config: VerifiersConfig) -> Loaded:
    """Load an environment, once per process. Raises `ConfigError`."""
    with _loading:
        return _load(config.model_dump_json(include=set(VerifiersConfig.model_fields)))


@lru_cache(maxsize=4)  # one for training, one for evaluation
def _load(options: str) -> Loaded:
    config = VerifiersConfig.model_validate_json(options)
    with _config_errors("env", f"verifiers cannot load the environment {config.env}", "install its package here"):
        taskset_kind = vf.taskset_config_type(config.env)
        kind = vf.env_config_type(config.env)
    seats = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(seats) != 1:
        raise ConfigError(
            f"{config.env} has {len(seats)} agents ({', '.join(seats)}), but there is one policy",
            where="environment.env",
            hint="use an environment with one agent",
        )
    (seat,) = seats
    with _config_errors("args", f"{config.env} does not accept these options", "see the config of its taskset"):
        taskset = taskset_kind.model_validate({**config.args, "id": config.env})
    with _config_errors("agent", f"{config.env} does not accept these agent options", "see AgentConfig in verifiers"):
        loaded = kind.model_validate({"taskset": taskset, seat: _agent(config, kind.model_fields[seat].default)})
        _check_harness(getattr(loaded, seat))
    return Loaded(config=loaded, seat=seat, tasks=_tasks(config, vf.load_taskset(loaded.taskset)))


def _agent(config: VerifiersConfig, declared: vf.AgentConfig) -> dict[str, Any]:
    """Return the agent's options. By default, the model's code is not executed and no data leaves this machine."""
    agent = dict(config.agent)
    if "runtime" not in declared.model_fields_set:
        agent.setdefault("runtime", {"type": "subprocess"})
    if declared.harness is None:
        own = vf.default_harness_id(config.env)
        agent["harness"] = {"id": "null" if own == "bash" else own, **agent.get("harness", {})}
    return agent


def _check_harness(agent: vf.AgentConfig) -> None:
    if not isinstance(agent.runtime, vf.SubprocessConfig):
        return
    if vf.load_harness(agent.harness).EXECUTES_CODE:
        raise ConfigError(
            f"the harness {agent.harness.id} runs code written by the model on this machine",
            where="environment.agent.runtime",
            hint="set a container: agent: {runtime: {type: docker}}",
        )
    # Without uv, verifiers would download and run its installer.
    places = f"{Path.home() / '.local' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if agent.harness.id == "null" and shutil.which("uv", path=places) is None:
        raise ConfigError(
            "the harness null needs uv, which is not in PATH",
            where="environment.agent.harness",
            hint="pip install uv, and make sure that the run's PATH contains it",
        )


def _tasks(config: VerifiersConfig, taskset: vf.Taskset) -> tuple[Any, ...]:
    if config.num_tasks is not None:
        taskset = taskset.take(config.num_tasks)
    if not taskset.bounded:
        raise ConfigError(
            f"the taskset of {config.env} is infinite",
            where="environment.num_tasks",
            hint="set how many to use: num_tasks: 1000",
        )
    with _config_errors("env", f"{config.env} cannot load its tasks", "check environment.args and the source of tasks"):
        tasks = tuple(taskset)
    if not tasks:
        raise ConfigError(f"{config.env} has zero tasks", where="environment.args", hint="see its options in verifiers")
    return tasks


@contextmanager
def _config_errors(key: str, problem: str, hint: str) -> Iterator[None]:
    """Convert errors of verifiers and its environments to errors of the run file's section."""
    try:
        yield
    except ConfigError:
        raise
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(
            f"{problem}: {printable(', '.join(faults))[:1000]}", where=f"environment.{key}", hint=hint
        ) from error
    except Exception as error:  # third-party code may raise anything
        detail = f"{problem}: {type(error).__name__}: {printable(first_line(error))[:500]}"
        raise ConfigError(detail, where=f"environment.{key}", hint=hint) from error
