"""Checks that a class is an environment in one of the supported forms, without instantiating it."""

from __future__ import annotations

import inspect

from rlhf_core.errors import PluginError

_NO_TOOLS = frozenset({"reset", "get_reward", "close", "compact"})
"""Public methods that are not tools."""


def tool_methods(kind: type) -> list[str]:
    """Return the sorted public methods of a class, which are its tools if `step` is not defined."""
    return [
        name
        for name, value in inspect.getmembers(kind)
        if inspect.isroutine(value) and not name.startswith("_") and name not in _NO_TOOLS
    ]


def check_shape(kind: type, where: str) -> None:
    """Raise `PluginError` if a class is not an environment in any supported form.

    Args:
        kind: Class of an environment.
        where: Location for the error.

    Example:
        >>> class Game:
        ...     def reset(self, task): ...
        ...     def step(self, reply): ...
        >>> check_shape(Game, "game.py")
    """
    if callable(getattr(kind, "run", None)):
        return
    if not callable(getattr(kind, "reset", None)):
        raise PluginError(
            f"{kind.__name__} is not an environment: reset is missing",
            where=where,
            hint="define reset(task) and step(reply) -> (observation, reward, done), or reset(**row) and tools",
        )
    if not callable(getattr(kind, "step", None)) and not hasattr(kind, "tools") and not tool_methods(kind):
        raise PluginError(
            f"{kind.__name__} is not an environment: it defines neither step nor public methods to use as tools",
            where=where,
            hint="add step(reply) -> (observation, reward, done), or methods with docstrings and type hints",
        )
