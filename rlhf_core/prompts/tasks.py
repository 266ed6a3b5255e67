"""Tasks without a prompt: an environment's `reset` gives the first text, from the task's seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..components import PromptsContext
from ..protocols import PromptSource
from .config import TasksConfig


class Tasks:
    """`size` empty records."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return {"prompt": ""}


def build(config: TasksConfig, context: PromptsContext) -> PromptSource:
    """Build the prompt source `tasks`."""
    return Tasks(config.size)
