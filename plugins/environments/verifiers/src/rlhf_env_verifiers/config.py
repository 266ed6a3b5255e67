"""Options of the environment `verifiers`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field, field_validator

from rlhf_core.config import Section

_RUN_OPTIONS = {
    "model": "the policy is its model",
    "client": "it calls the policy",
    "sampling": "the section `engine` sets sampling options",
    "max_turns": "environment.max_turns sets it",
    "retries": "environment.retries sets it",
}
"""Options of an agent that the run sets, with the reason."""
_FILE_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*", re.DOTALL)


class VerifiersConfig(Section):
    """Options of the environment `verifiers`."""

    env: str = Field(
        min_length=1, description="Id of an installed environment (a taskset), as in the commands of verifiers."
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of its taskset, as after --env.taskset. on the command line of verifiers, such as "
        "{split: train}.",
    )
    agent: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of its agent, as after --env.agent.: harness, runtime, timeout, max_total_tokens, … By "
        "default the environment's own, else the harness `null` (turns and the taskset's tools) in a subprocess.",
    )
    num_tasks: int | None = Field(
        None, ge=1, description="Number of tasks to use, from the first. null uses all. Required for infinite tasksets."
    )

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        if "id" in args:
            raise ValueError("the id is set by `env`: remove it")
        return args

    @field_validator("agent")
    @classmethod
    def _check_agent(cls, agent: dict[str, Any]) -> dict[str, Any]:
        if taken := next((key for key in agent if key in _RUN_OPTIONS), None):
            raise ValueError(f"{taken}: {_RUN_OPTIONS[taken]}, so remove it")
        harness = agent.get("harness")
        if isinstance(harness, dict) and "env" in harness:  # could install and run another program
            raise ValueError("harness.env: set variables in the run's environment and name them in forward_env")
        return agent

    @field_validator("args", "agent")
    @classmethod
    def _check_functions(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in _functions(options):
            if ".py:" in name and not _FILE_FUNCTION.fullmatch(name):
                raise ValueError(f"fn: {name!r:.200} is not a function: write FILE.py:FUNCTION")
        return options


def _functions(value: Any) -> Iterator[str]:
    """Yield the values of all keys `fn` in a part of a run file, which name functions that verifiers calls."""
    if isinstance(value, dict):
        if isinstance(name := value.get("fn"), str):
            yield name
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _functions(part)
