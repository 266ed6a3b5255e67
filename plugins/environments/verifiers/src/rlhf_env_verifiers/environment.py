"""`verifiers`: one episode of an environment of that library, whose agent asks the policy."""

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

_MAX_SAID_CHARS = 600


class RolloutFailed(Exception):
    """A rollout of verifiers failed. Core takes it for a bound where it had refused the agent's last call."""


class VerifiersEnvironment:
    """Task `task.seed` (modulo their number) of the environment's own, played by its harness at our endpoint."""

    def __init__(self, config: VerifiersConfig, context: TaskContext) -> None:
        """Raises `ConfigError` for what verifiers cannot load."""
        self._loaded = load(config)

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Have verifiers play it. Raises `RolloutFailed` for what it says has failed."""
        if task.prompt.text or task.prompt.messages:
            raise ConfigError(
                "an environment of verifiers brings its own prompts",
                where="prompts",
                hint="leave out the section prompts; environment.args says what its tasks are",
            )
        tasks, max_turns = self._loaded.tasks, policy.remaining_turns
        endpoint = await policy.endpoint()
        with _variable(endpoint.api_key) as name:
            client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=name)
            context = vf.ModelContext(model=endpoint.model, client=client)
            environment = vf.load_environment(self._config(max_turns))
            async with environment.serving():
                episode = await environment.run_episode(tasks[task.seed % len(tasks)], context)
        return _outcome(episode)

    def _config(self, max_turns: int) -> vf.EnvConfig:
        """The environment's, with the bound that verifiers keeps: it scores what was done until then."""
        config, seat = self._loaded.config, self._loaded.seat
        agent = getattr(config, seat).model_copy(update={"max_turns": max_turns})
        return config.model_copy(update={seat: agent})


@contextmanager
def _variable(key: str) -> Iterator[str]:
    """An environment variable with the key while the episode is played: verifiers takes keys from there only.

    It keeps variables whose name has API_KEY from the programs that it starts.
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
        raise RolloutFailed(_said(errors[-1]) if errors else "verifiers does not say why")
    if len(episode.traces) != 1:
        raise RolloutFailed(f"the environment let its agent run {len(episode.traces)} times, not once")
    trace = episode.traces[0]
    if trace.is_timeout and trace.stop_condition != "agent_timeout":
        raise RolloutFailed(f"verifiers says {trace.stop_condition}")
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Outcome(reward=trace.reward, metrics={**scores, **metrics}, status=_status(trace))


def _status(trace: vf.Trace) -> Status:
    """Truncated also where time was up, or the policy refused the last call and the harness took that for the end."""
    was_refused = bool(trace.calls) and trace.calls[-1].error is not None
    return "truncated" if trace.is_truncated or trace.is_timeout or was_refused else "done"


def _said(error: vf.Error) -> str:
    """Begin and end of a message, in one line: the end has the cause where a program has failed."""
    said = f"{error.type}: {' '.join(error.message.split())}"
    if len(said) <= _MAX_SAID_CHARS:
        return said
    return f"{said[: _MAX_SAID_CHARS // 3]} … {said[-_MAX_SAID_CHARS * 2 // 3 :]}"
