"""A `tool_choice` that forces a call, in the forms of several dialects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_episodes import CallRefused, Tool

from .wire import invalid, unsupported

FORCES_ANY = ("required", "any")


@dataclass(frozen=True, slots=True)
class ForcedChoice:
    """Which tools an answer has to call."""

    is_forced: bool
    """Whether the answer has to call a tool, or the choice is of an unsupported type."""
    name: str | None = None
    """The tool that it has to call. None: any."""
    is_valid: bool = True

    @classmethod
    def of(cls, choice: Any, function: Callable[[Mapping[str, Any]], Any]) -> ForcedChoice:
        """Read a choice.

        Args:
            choice: `tool_choice` of a body.
            function: Returns the part of a choice of one tool that contains its name.

        Example:
            >>> ForcedChoice.of({"type": "function", "name": "add"}, lambda choice: choice)
            ForcedChoice(is_forced=True, name='add', is_valid=True)
        """
        if choice in (None, "auto", "none"):
            return cls(False)
        if choice in FORCES_ANY:
            return cls(True)
        part = function(choice) if isinstance(choice, dict) and choice.get("type") in ("function", "tool") else None
        name = part.get("name") if isinstance(part, dict) else None
        return cls(True, name, isinstance(name, str) and bool(name))

    @property
    def allows_several(self) -> bool:
        """Whether the answer may contain several calls."""
        return self.name is None

    def refusal(self, tools: Sequence[Tool] | Sequence[Any] | None, hint: str) -> CallRefused | None:
        """Return the refusal of a choice of an unsupported type, or of a choice without tools, or None.

        Args:
            tools: Tools of the body.
            hint: What to send instead.
        """
        if not self.is_valid:
            return unsupported("tool_choice", hint)
        return None if tools else invalid("tool_choice: forces a call, but tools are missing")

    def names(self, tools: Sequence[Tool] | None) -> tuple[str, ...]:
        """Return the names of the tools of which the answer has to call one, none if it is free.

        Args:
            tools: Tools of the call.
        """
        if not self.is_forced:
            return ()
        return tuple(str(tool["function"]["name"]) for tool in tools or ()) if self.name is None else (self.name,)


def parallel_refusal(value: bool | None, *, is_forced: bool) -> CallRefused | None:
    """Return the refusal of `parallel_tool_calls: false` for an answer that is not forced to call a tool, or None.

    Args:
        value: `parallel_tool_calls` of a body.
        is_forced: Whether the answer has to call a tool.
    """
    return unsupported("parallel_tool_calls", "omit it, or force a call") if value is False and not is_forced else None
