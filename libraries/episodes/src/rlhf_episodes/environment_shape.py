"""Checks whether a class is an environment in one of the supported forms, without running it."""

from __future__ import annotations

import inspect

from rlhf_core.errors import PluginError

_NO_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods that are not tools."""


def tool_methods(kind: type) -> list[str]:
    """Sorted public methods of a class, which are its tools if it has no `step`."""
    return [
        name
        for name, value in inspect.getmembers(kind)
        if inspect.isroutine(value) and not name.startswith("_") and name not in _NO_TOOLS
    ]


def check_shape(kind: type, where: str) -> None:
    """Raise `PluginError` where a class is not an environment in any form."""
    if callable(getattr(kind, "run", None)):
        return
    if not callable(getattr(kind, "reset", None)):
        raise PluginError(
            f"{kind.__name__} is no environment: it has no reset",
            where=where,
            hint="give it reset(task) and step(reply) -> (observation, reward, done), or reset(**row) and tools",
        )
    if not callable(getattr(kind, "step", None)) and not hasattr(kind, "tools") and not tool_methods(kind):
        raise PluginError(
            f"{kind.__name__} is no environment: it has neither step nor a public method that could be a tool",
            where=where,
            hint="add step(reply) -> (observation, reward, done), or methods with docstrings and type hints",
        )
