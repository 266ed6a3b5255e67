"""Reads JSON written by a model: in linear time, within bounds; errors can be shown to the model."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

MAX_CHARS = 65_536
MAX_DEPTH = 32
MAX_DIGITS = 300
"""Most digits of one integer, since Python's conversion takes quadratic time."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
"""A string, or an unclosed one to its end: it always matches at a quote, so nothing is read twice."""
_OPENING, _BRACKET = frozenset("[{"), re.compile(r"[\[\]{}]")


class UnreadableJson(ValueError):
    """The text is not acceptable JSON; the message says why."""


def read_json(text: str) -> Any:
    """Parse `text`.

    Besides invalid JSON, this refuses values that could surprise the caller: NaN and infinities, duplicate keys,
    invalid Unicode (lone surrogates), and text that is too long or too deep. Raises `UnreadableJson`.
    """
    value, end = read_first_json(text)
    if text[end:].strip():
        raise UnreadableJson(f"there is more after the JSON value, at character {end}")
    return value


def read_first_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The value at `start` (leading blanks are skipped), and its end. Raises `UnreadableJson`."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    if len(text) - start > MAX_CHARS:
        raise UnreadableJson(f"it is longer than {MAX_CHARS} characters")
    _check_depth(text[start:])
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UnreadableJson(f"it is no valid JSON: {error.msg} at character {error.pos - start}") from None
    except UnicodeEncodeError:
        raise UnreadableJson("it has half of a surrogate pair, which is no text") from None
    except RecursionError:  # the caller may be deep in the stack already
        raise UnreadableJson("it is nested too deeply") from None
    return value, end


def _check_depth(text: str) -> None:
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in _OPENING else -1
        if depth > MAX_DEPTH:
            raise UnreadableJson(f"it is nested more than {MAX_DEPTH} deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise UnreadableJson(f"the key {twice!r:.80} is given twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise UnreadableJson(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise UnreadableJson(f"the number {digits:.40} is too large")
    return value


def _constant(name: str) -> float:
    raise UnreadableJson(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_constant)
