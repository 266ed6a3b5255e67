"""Reads JSON written by a model, in linear time and within limits. Error messages can be shown to the model."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

MAX_CHARS = 65_536
MAX_DEPTH = 32
MAX_DIGITS = 300
"""Maximum number of digits of an integer, since Python's conversion takes quadratic time."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
"""A string, or an unclosed one to the end of the text. It matches at every quote, so no character is read twice."""
_OPENING, _BRACKET = frozenset("[{"), re.compile(r"[\[\]{}]")


class UnreadableJson(ValueError):
    """The text is not acceptable JSON. The message gives the reason and can be shown to a model."""


def read_json(text: str) -> Any:
    """Parse a text that is one JSON value.

    In addition to invalid JSON, it refuses values that could surprise the caller: NaN and infinities, duplicate keys,
    invalid Unicode (lone surrogates), and text that is too long or too deeply nested. Raises `UnreadableJson`.

    Example:
        >>> read_json('{"name": "add", "name": "now"}')
        Traceback (most recent call last):
        rlhf_web.untrusted_json.UnreadableJson: the key 'name' occurs twice
    """
    value, end = read_first_json(text)
    if text[end:].strip():
        raise UnreadableJson(f"there is more text after the JSON value, at character {end}")
    return value


def read_first_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value at a position, with the checks of `read_json`.

    Args:
        text: text that contains the value.
        start: position of the value. Blanks before it are skipped.

    Returns:
        The value and the position after it.

    Raises:
        UnreadableJson: if the value is not acceptable.

    Example:
        >>> read_first_json('verdict: {"score": 7} done', start=9)
        ({'score': 7}, 21)
    """
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    if len(text) - start > MAX_CHARS:
        raise UnreadableJson(f"it is longer than {MAX_CHARS} characters")
    _check_depth(text[start:])
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UnreadableJson(f"it is not valid JSON: {error.msg} at character {error.pos - start}") from None
    except UnicodeEncodeError:
        raise UnreadableJson("it has half of a surrogate pair, which is not text") from None
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
    values = dict(pairs)
    if len(values) < len(pairs):
        duplicate = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise UnreadableJson(f"the key {duplicate!r:.80} occurs twice")
    return values


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
    raise UnreadableJson(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_constant)
