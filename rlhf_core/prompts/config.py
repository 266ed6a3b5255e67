"""Options of core's own prompt sources."""

from __future__ import annotations

from pydantic import Field

from ..config.sections import PromptsConfig


class JsonlConfig(PromptsConfig):
    """A JSON Lines file, one object a line."""

    path: str = Field(min_length=1, description="The file.")


class TasksConfig(PromptsConfig):
    """Empty tasks, for an environment that makes its own from a seed."""

    size: int = Field(10_000, ge=1, description="Tasks of one epoch; each has a position and seeds of its own.")
