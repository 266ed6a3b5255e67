"""`verifiers`: one episode of an environment of that library, whose agent calls the policy."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import verifiers.v1 as vf

from rlhf_core.components import TaskContext
from rlhf_core.errors import ConfigError
from rlhf_episodes import Outcome, Policy, Status, Task

from .config import VerifiersConfig
from .loading import load

_MAX_ERROR_CHARS = 600


class RolloutFailed(Exception):
    """A rollout of verifiers failed. Core treats it as truncated if it refused the agent's last call."""


class VerifiersEnvironment:
    """Plays task `task.seed` (modulo the number of tasks) with the environment's harness at the episode's endpoint."""

    def __init__(self, config: VerifiersConfig, context: TaskContext) -> None:
        """Load the environment. Raises `ConfigError` if verifiers cannot load it."""
        self._loaded = load(config)

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Play the episode with verifiers. Raises `RolloutFailed` if verifiers reports a failure."""
        if task.prompt.text or task.prompt.messages:
            raise ConfigError(
                "an environment of verifiers provides its own prompts",
                where="prompts",
                hint="remove the section prompts and select tasks with environment.args",
            )
        tasks, max_turns = self._loaded.tasks, policy.remaining_turns
        endpoint = await policy.endpoint()
        with _key_variable(endpoint.api_key) as name:
            client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=name)
            context = vf.ModelContext(model=endpoint.model, client=client)
            environment = vf.load_environment(self._config(max_turns))
            async with environment.serving():
                episode = await environment.run_episode(tasks[task.seed % len(tasks)], context)
        return _outcome(episode)

    def _config(self, max_turns: int) -> vf.EnvConfig:
        """Return the environment's configuration with `max_turns`, at which verifiers stops and scores the rollout."""
        config, seat = self._loaded.config, self._loaded.seat
        agent = getattr(config, seat).model_copy(update={"max_turns": max_turns})
        return config.model_copy(update={seat: agent})


@contextmanager
def _key_variable(key: str) -> Iterator[str]:
    """Set an environment variable to the key during the episode, since verifiers reads keys only from variables.

    verifiers does not pass variables whose name contains API_KEY to the programs that it starts.
    """
    name = f"RLHF_EPISODE_API_KEY_{secrets.token_hex(8).upper()}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


def _outcome(episode: vf.Episode) -> Outcome:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RolloutFailed(_error_text(errors[-1]) if errors else "verifiers did not report an error")
    if len(episode.traces) != 1:
        raise RolloutFailed(f"the environment ran its agent {len(episode.traces)} times, not once")
    trace = episode.traces[0]
    if trace.is_timeout and trace.stop_condition != "agent_timeout":
        raise RolloutFailed(f"verifiers reported {trace.stop_condition}")
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Outcome(reward=trace.reward, metrics={**scores, **metrics}, status=_status(trace))


def _status(trace: vf.Trace) -> Status:
    """Return the status. Timeouts, and a last call that the endpoint refused, count as truncated too."""
    was_refused = bool(trace.calls) and trace.calls[-1].error is not None
    return "truncated" if trace.is_truncated or trace.is_timeout or was_refused else "done"


def _error_text(error: vf.Error) -> str:
    """Return the start and end of a message in one line. The end contains the cause if a program failed."""
    text = f"{error.type}: {' '.join(error.message.split())}"
    if len(text) <= _MAX_ERROR_CHARS:
        return text
    return f"{text[: _MAX_ERROR_CHARS // 3]} … {text[-_MAX_ERROR_CHARS * 2 // 3 :]}"
