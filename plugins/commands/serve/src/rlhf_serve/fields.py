"""Fields that the requests of several dialects contain, with their checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from rlhf_episodes import Tool

from .wire import parse_json

MAX_TOP = 20
"""Maximum number of most likely tokens to report at each position."""
_MAX_STOPS = 16
_MAX_TOOLS = 512
_MAX_ID_CHARS = 512
_MIN_TEMPERATURE = 1e-8
"""Below it, logits divided by the temperature may overflow."""


def check_text(text: str) -> str:
    """Return the text. Raises `ValueError` if it contains half of a surrogate pair."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("has half of a surrogate pair, which is not text")
    return text


def check_texts(value: Any) -> Any:
    """Check all keys and values of parsed JSON."""
    try:
        check_text(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return value


def _parse_arguments(value: Any) -> Any:
    """Parse the arguments of a call, which are JSON in a text. Anything else becomes empty arguments."""
    return check_texts(parse_json(value)) if isinstance(value, str) and value else {}


def _check_temperature(value: float) -> float:
    if 0 < value < _MIN_TEMPERATURE:
        raise ValueError(f"must be 0, which is greedy, or at least {_MIN_TEMPERATURE}")
    return value


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Tool:
    """Return a tool's description in the form that chat templates take.

    Args:
        name: Name of the function.
        description: Its description, or None.
        parameters: JSON schema of the arguments, or None.

    Example:
        >>> function_tool("now", None, None)
        {'type': 'function', 'function': {'name': 'now'}}
    """
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = dict(parameters)
    return {"type": "function", "function": function}


Text = Annotated[str, Field(min_length=1)]
"""pydantic counts its characters and therefore refuses half of a surrogate pair."""
Texts = Annotated[list[Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Stops = Annotated[Texts, Field(max_length=_MAX_STOPS)]
Limit = Annotated[int, Field(ge=1, le=2**31)]
Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_check_temperature)]
Probability = Annotated[float, Field(ge=0, le=1)]
Id = Annotated[str, Field(max_length=_MAX_ID_CHARS)]
"""Id of a call, chosen by a client or a server."""
Checked = Annotated[str, AfterValidator(check_text)]
"""Text, which may be empty."""
Arguments = Annotated[dict[str, Any], BeforeValidator(_parse_arguments)]
"""Arguments of a call as JSON in a text."""
Object = Annotated[dict[str, Any], AfterValidator(check_texts)]
"""A JSON object."""
JSON_OBJECT: dict[str, Any] = {"type": "object"}
"""JSON schema of any object."""
MaxTools = Field(None, max_length=_MAX_TOOLS)
