"""How an observation is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

WriteObservation = Callable[[Any, Any, Callable[[], Any]], str]
"""Observation, info, and a function that renders -> text."""

RENDER = "{render}"
_PLACES = re.compile(r"\{(observation|render)\}")
_COLOURED = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m([^\x1b]*)\x1b\[0?m")
_CODES = re.compile(r"\x1b\[[0-9;]*m")


def template(text: str) -> WriteObservation:
    """Text with `{observation}` and `{render}` in it; nothing else in braces is special."""

    def write(observation: Any, info: Any, render: Callable[[], Any]) -> str:
        def fill(place: re.Match[str]) -> str:
            return plain(observation) if place[1] == "observation" else without_colours(str(render()))

        return _PLACES.sub(fill, text)

    return write


def plain(observation: Any) -> str:
    """Text as it is, all else as JSON; NumPy's arrays and numbers as lists and numbers."""
    return observation if isinstance(observation, str) else json.dumps(observation, default=_listed, ensure_ascii=False)


def without_colours(text: str) -> str:
    """A terminal's text without its codes: what was coloured stands in brackets."""
    return _CODES.sub("", _COLOURED.sub(r"[\1]", text)).strip("\n")


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
