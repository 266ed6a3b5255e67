"""Conversion of observations to text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

WriteObservation = Callable[[Any, Any, Callable[[], Any]], str]
"""Converts an observation, its info and a render function to text."""

RENDER = "{render}"
_PLACEHOLDERS = re.compile(r"\{(observation|render)\}")
_COLORED = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m([^\x1b]*)\x1b\[0?m")
_CODES = re.compile(r"\x1b\[[0-9;]*m")


def template(text: str) -> WriteObservation:
    """Return a function that fills in `{observation}` and `{render}`. Other braces are kept."""

    def write(observation: Any, info: Any, render: Callable[[], Any]) -> str:
        def fill(match: re.Match[str]) -> str:
            return plain(observation) if match[1] == "observation" else strip_colors(str(render()))

        return _PLACEHOLDERS.sub(fill, text)

    return write


def plain(observation: Any) -> str:
    """Return text unchanged and anything else as JSON, with NumPy arrays as lists.

    Example:
        >>> plain({"position": (1, 2)})
        '{"position": [1, 2]}'
    """
    return observation if isinstance(observation, str) else json.dumps(observation, default=_tolist, ensure_ascii=False)


def strip_colors(text: str) -> str:
    r"""Remove terminal codes from a text and put colored parts in brackets.

    Example:
        >>> strip_colors("S\x1b[41mF\x1b[0mG")
        'S[F]G'
    """
    return _CODES.sub("", _COLORED.sub(r"[\1]", text)).strip("\n")


def _tolist(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
