"""An environment of verifiers as the options say it: its configuration, and its tasks."""

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
"""Episodes begin at the same time, on threads of their own; one of them loads for all."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded environment, shared by its episodes, none of which changes it."""

    config: vf.EnvConfig
    """For `load_environment`; its type is the environment's own."""
    seat: str
    """The environment's name for its one agent, the policy."""
    tasks: tuple[Any, ...]


def load(config: VerifiersConfig) -> Loaded:
    """Load it, once in this process. Raises `ConfigError`."""
    with _loading:
        return _load(config.model_dump_json(include=set(VerifiersConfig.model_fields)))


@lru_cache(maxsize=4)  # one for training, one for evaluation
def _load(options: str) -> Loaded:
    config = VerifiersConfig.model_validate_json(options)
    with _told("env", f"{config.env} is no environment of verifiers here", "install its package where this runs"):
        taskset_kind = vf.taskset_config_type(config.env)
        kind = vf.env_config_type(config.env)
    seats = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(seats) != 1:
        raise ConfigError(
            f"{config.env} has {len(seats)} agents ({', '.join(seats)}), but there is one policy",
            where="environment.env",
            hint="name an environment of one agent",
        )
    (seat,) = seats
    with _told("args", f"{config.env} does not take these options", "see the configuration of its taskset"):
        taskset = taskset_kind.model_validate({**config.args, "id": config.env})
    with _told("agent", f"the agent of {config.env} does not take these options", "see AgentConfig in verifiers"):
        found = kind.model_validate({"taskset": taskset, seat: _agent(config, kind.model_fields[seat].default)})
        _check_harness(getattr(found, seat))
    return Loaded(config=found, seat=seat, tasks=_tasks(config, vf.load_taskset(found.taskset)))


def _agent(config: VerifiersConfig, declared: vf.AgentConfig) -> dict[str, Any]:
    """Options of the agent. Where neither they nor the environment say it, no code of the model is run, and nothing
    leaves this machine."""
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
            f"the harness {agent.harness.id} runs what the model writes, on this machine",
            where="environment.agent.runtime",
            hint="say in what: agent: {runtime: {type: docker}}",
        )
    # Without it verifiers would fetch an installer from the web and run it.
    places = f"{Path.home() / '.local' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if agent.harness.id == "null" and shutil.which("uv", path=places) is None:
        raise ConfigError(
            "the harness null is run by uv, which PATH does not find",
            where="environment.agent.harness",
            hint="pip install uv, and start the run where PATH has it",
        )


def _tasks(config: VerifiersConfig, taskset: vf.Taskset) -> tuple[Any, ...]:
    if config.num_tasks is not None:
        taskset = taskset.take(config.num_tasks)
    if not taskset.bounded:
        raise ConfigError(
            f"the tasks of {config.env} have no end",
            where="environment.num_tasks",
            hint="say how many of them: num_tasks: 1000",
        )
    with _told("env", f"{config.env} cannot load its tasks", "see environment.args, and what it loads them from"):
        tasks = tuple(taskset)
    if not tasks:
        raise ConfigError(f"{config.env} has no task", where="environment.args", hint="see its options in verifiers")
    return tasks


@contextmanager
def _told(key: str, what: str, hint: str) -> Iterator[None]:
    """Turn errors of verifiers and its environments into errors of the run file's section."""
    try:
        yield
    except ConfigError:
        raise
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(
            f"{what}: {printable('; '.join(faults))[:1000]}", where=f"environment.{key}", hint=hint
        ) from error
    except Exception as error:  # a stranger's package may raise anything
        said = f"{what}: {type(error).__name__}: {printable(first_line(error))[:500]}"
        raise ConfigError(said, where=f"environment.{key}", hint=hint) from error
