"""Options of the environment `verifiers`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field, field_validator

from rlhf_core.config import Section

_OF_THE_RUN = {
    "model": "the policy is its model",
    "client": "it asks the policy",
    "sampling": "the section `engine` says how the policy samples",
    "max_turns": "environment.max_turns says it",
    "retries": "environment.retries says it",
}
"""Options of an agent that are not its own here, and why."""
_FUNCTION_OF_A_FILE = re.compile(r".+\.py:[A-Za-z_]\w*", re.DOTALL)


class VerifiersConfig(Section):
    """Options of the environment `verifiers`."""

    env: str = Field(
        min_length=1, description="Id of an installed environment (a taskset), as the commands of verifiers take it."
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of its taskset: what follows --env.taskset. on the command line of verifiers, such as "
        "{split: train}.",
    )
    agent: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of its agent, likewise: harness, runtime, timeout, max_total_tokens, … Unless told "
        "these are the environment's own, else the harness `null` (turns, and the taskset's tools), in subprocess.",
    )
    num_tasks: int | None = Field(
        None, ge=1, description="Only its first tasks, so many; null is all. A taskset without an end needs it."
    )

    @field_validator("args")
    @classmethod
    def _leaves_the_id(cls, args: dict[str, Any]) -> dict[str, Any]:
        if "id" in args:
            raise ValueError("the id is what `env` says: take it out")
        return args

    @field_validator("agent")
    @classmethod
    def _leaves_the_policy(cls, agent: dict[str, Any]) -> dict[str, Any]:
        if taken := next((key for key in agent if key in _OF_THE_RUN), None):
            raise ValueError(f"{taken}: {_OF_THE_RUN[taken]}: take it out")
        harness = agent.get("harness")
        if isinstance(harness, dict) and "env" in harness:  # could have another program installed and run
            raise ValueError("harness.env: set such variables where the run starts, and name them in forward_env")
        return agent

    @field_validator("args", "agent")
    @classmethod
    def _names_functions_as_core_reads_them(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in _functions(options):
            if ".py:" in name and not _FUNCTION_OF_A_FILE.fullmatch(name):
                raise ValueError(f"fn: {name!r:.200} names no function: write FILE.py:FUNCTION")
        return options


def _functions(value: Any) -> Iterator[str]:
    """All that the key `fn` says anywhere in a part of a run file: functions that are called by verifiers."""
    if isinstance(value, dict):
        if isinstance(name := value.get("fn"), str):
            yield name
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _functions(part)
