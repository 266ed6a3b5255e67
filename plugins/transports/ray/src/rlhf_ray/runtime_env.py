"""Ray's runtime environment of a run's actors: variables, files and packages that Ray prepares on each node."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.errors import UserInputError, first_line
from rlhf_core.util import redact_mapping, suggestion

WHERE = "transport.runtime_env"
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the driver of a submitted job."""
_OVERRIDE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
_PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"
"""Environment variable with the plugins of the cluster that add keys."""
_VARIABLES = "env_vars"


def init_options(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of `ray.init` for the option `transport.runtime_env`, without its `own_variables`.

    Inside a job, Ray adds the job's runtime environment.

    Raises:
        UserInputError: Ray rejects the option or does not know a key, a variable is not set in this process, or the
            job's runtime environment has the same entry.
    """
    own = own_variables(runtime_env)
    wanted = dict(runtime_env or {})
    variables = {name: value for name, value in (wanted.pop(_VARIABLES, None) or {}).items() if name not in own}
    if variables:
        wanted[_VARIABLES] = variables
    if not wanted:
        return {}
    if os.environ.get(_OVERRIDE) != "1" and (shared := sorted(_shared_entries(wanted, _job_environment()))):
        raise UserInputError(
            f"the Ray job that runs this command already sets {', '.join(shared)}",
            where=WHERE,
            hint=f"remove it from one of the two, or set {_OVERRIDE}=1 in the job, so that the run file has precedence",
        )
    _check(wanted)
    return {"runtime_env": wanted}


def own_variables(runtime_env: Mapping[str, Any] | None) -> dict[str, str]:
    """Variables that the actors set themselves, because Ray writes those that it sets to its logs and its dashboard.

    They are those with a secret, as in the run folder, and those without a value, which have that of this process.

    Raises:
        UserInputError: A variable without a value is not set in this process.
    """
    variables: Mapping[str, str | None] = (runtime_env or {}).get(_VARIABLES) or {}
    missing = [name for name, value in variables.items() if value is None and name not in os.environ]
    if missing:
        raise UserInputError(
            f"not set in the environment of this command: {', '.join(missing)}",
            where=f"{WHERE}.{_VARIABLES}",
            hint=f"export {missing[0]}=VALUE first. The value null copies it to the actors",
        )
    without_secrets = redact_mapping(variables)
    return {
        name: os.environ[name] if value is None else value
        for name, value in variables.items()
        if value is None or without_secrets[name] != value
    }


def _check(wanted: Mapping[str, Any]) -> None:
    from ray.runtime_env import RuntimeEnv

    known = sorted({name.lstrip("_") for name in RuntimeEnv.known_fields})
    if _PLUGINS not in os.environ and (unknown := sorted(wanted.keys() - set(known) - RuntimeEnv.known_fields)):
        # Ray takes it for the key of a plugin, and ignores it.
        problem = f"Ray does not have the key {unknown[0]}{suggestion(unknown[0], known)}"
        raise UserInputError(problem, where=WHERE, hint=f"its keys are {', '.join(known)}")
    try:
        RuntimeEnv(**wanted)
    except (TypeError, ValueError) as error:
        hint = "https://docs.ray.io/en/latest/ray-core/handling-dependencies.html lists keys and values"
        raise UserInputError(first_line(error), where=WHERE, hint=hint) from error


def _job_environment() -> Mapping[str, Any]:
    """Runtime environment of the job whose driver this process is. Empty outside of jobs."""
    job = json.loads(os.environ.get(JOB_CONFIG, "{}"))
    return job.get("runtime_env") or {}


def _shared_entries(ours: Mapping[str, Any], jobs: Mapping[str, Any]) -> Iterator[str]:
    """Entries of both. Ray merges variables by name, everything else by its key, and rejects duplicates."""
    yield from (ours.keys() & jobs.keys()) - {_VARIABLES}
    both = (ours.get(_VARIABLES) or {}).keys() & (jobs.get(_VARIABLES) or {}).keys()
    yield from (f"{_VARIABLES}.{name}" for name in both)
