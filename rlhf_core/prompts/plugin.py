"""Core's own prompt sources, registered by entry points like any plugin's."""

from __future__ import annotations

from ..components import Component, PromptsContext
from ..protocols import PromptSource
from .config import JsonlConfig, TasksConfig

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


def build_tasks(config: TasksConfig, context: PromptsContext) -> PromptSource:
    """Build the prompt source `tasks`: `size` empty records, to which an environment gives the first text."""
    return [{"prompt": ""}] * config.size
