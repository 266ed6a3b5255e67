"""Read a numbered action from a reply, which is hostile text: reading it takes linear time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.errors import ConfigError

ReadAction = Callable[[str], Any]
"""Text of a reply -> the action, or None where it says none."""

_MAX_DIGITS = 18
_NUMBER = re.compile(r"(?<!\w)(?<!\d\.)-?[0-9]+(?!\w)(?!\.\d)")


def numbered(first: int, count: int) -> ReadAction:
    """The last whole number in a reply, where it is one of `count` from `first` on."""

    def read(text: str) -> int | None:
        found = _last(_NUMBER, text)
        if found is None or len(found) > _MAX_DIGITS:
            return None
        return int(found) if first <= int(found) < first + count else None

    return read


def named(names: Sequence[str], first: int, count: int) -> ReadAction:
    """The last of the names in a reply, as a whole word in any case.

    Raises `ConfigError` where the space has another number of actions.
    """
    if len(names) != count:
        raise ConfigError(
            f"has {len(names)} names, but the environment has {count} actions",
            where="environment.actions",
            hint="name each of them, in the order of their numbers",
        )
    number = {name.strip().casefold(): first + place for place, name in enumerate(names)}
    # Of two names that begin alike the longer one is tried first.
    listed = "|".join(re.escape(name) for name in sorted(number, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{listed})(?!\w)")

    def read(text: str) -> int | None:
        found = _last(pattern, text.casefold())
        return None if found is None else number[found]

    return read


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = None
    for match in pattern.finditer(text):
        found = match[0]
    return found
