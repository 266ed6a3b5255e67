"""Core's prompt sources, registered by entry points like those of plugins."""

from __future__ import annotations

from pydantic import Field

from ..components import Component, TaskContext
from ..config.sections import PromptsConfig
from ..protocols import PromptSource


class JsonlConfig(PromptsConfig):
    """A JSON Lines file with one object per line."""

    path: str = Field(min_length=1, description="Path of the file.")


class TasksConfig(PromptsConfig):
    """Empty tasks, for an environment that creates its tasks from a seed."""

    size: int = Field(10_000, ge=1, description="Number of tasks per epoch, each with a different position and seed.")


jsonl = Component(
    summary="A JSON Lines file: prompt (text or chat messages), optional answer, any metadata.",
    config=JsonlConfig,
    build="rlhf_core.prompts.jsonl:build",
)
tasks = Component(
    summary="Tasks without a prompt, for an environment that provides its own.",
    config=TasksConfig,
    build="rlhf_core.prompts.plugin:build_tasks",
)


def build_tasks(config: TasksConfig, context: TaskContext) -> PromptSource:
    """Build the prompt source `tasks`: `size` empty records, for which an environment provides the first text."""
    return [{"prompt": ""}] * config.size
