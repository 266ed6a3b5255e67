"""Core's own prompt sources, registered by entry points like any plugin's."""

from __future__ import annotations

from pydantic import Field

from ..components import Component, TaskContext
from ..config.sections import PromptsConfig
from ..protocols import PromptSource


class JsonlConfig(PromptsConfig):
    """A JSON Lines file, one object a line."""

    path: str = Field(min_length=1, description="The file.")


class TasksConfig(PromptsConfig):
    """Empty tasks, for an environment that makes its own from a seed."""

    size: int = Field(10_000, ge=1, description="Tasks of one epoch; each has a position and seeds of its own.")


jsonl = Component(
    summary="A JSON Lines file: prompt (text or chat messages), optional answer, any metadata.",
    config=JsonlConfig,
    build="rlhf_core.prompts.jsonl:build",
)
tasks = Component(
    summary="Tasks without a prompt, for an environment that brings its own.",
    config=TasksConfig,
    build="rlhf_core.prompts.plugin:build_tasks",
)


def build_tasks(config: TasksConfig, context: TaskContext) -> PromptSource:
    """Build the prompt source `tasks`: `size` empty records, to which an environment gives the first text."""
    return [{"prompt": ""}] * config.size
