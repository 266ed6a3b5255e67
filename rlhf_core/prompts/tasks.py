"""Tasks without a prompt: an environment's `reset` gives the first text, from the task's seed."""

from __future__ import annotations

from ..components import PromptsContext
from ..protocols import PromptSource
from .config import TasksConfig


def build(config: TasksConfig, context: PromptsContext) -> PromptSource:
    """Build the prompt source `tasks`: `size` empty records."""
    return [{"prompt": ""}] * config.size
