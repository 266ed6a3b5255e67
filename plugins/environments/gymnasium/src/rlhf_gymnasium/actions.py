"""Parse a numbered action from a reply. Replies are untrusted, so parsing takes linear time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.errors import ConfigError

ReadAction = Callable[[str], Any]
"""Returns the action in a reply's text, or None if there is none."""

_MAX_DIGITS = 18
_NUMBER = re.compile(r"(?<!\w)(?<!\d\.)-?[0-9]+(?!\w)(?!\.\d)")


def numbered(first: int, count: int) -> ReadAction:
    """Return a function that reads the last integer of a reply, if it is one of `count` numbers starting at `first`.

    Example:
        >>> read = numbered(first=0, count=4)
        >>> read("Not 1 but 3."), read("Action 7")
        (3, None)
    """

    def read(text: str) -> int | None:
        digits = _last_match(_NUMBER, text)
        if digits is None or len(digits) > _MAX_DIGITS:
            return None
        return int(digits) if first <= int(digits) < first + count else None

    return read


def named(names: Sequence[str], first: int, count: int) -> ReadAction:
    """Return a function that reads the last name in a reply, as a whole word in any case.

    Raises `ConfigError` if the number of names is not `count`, the number of actions.

    Example:
        >>> read = named(["left", "right"], first=0, count=2)
        >>> read("Not left. RIGHT!"), read("straight on")
        (1, None)
    """
    if len(names) != count:
        raise ConfigError(
            f"has {len(names)} names, but the environment has {count} actions",
            where="environment.actions",
            hint="list one name per action, in the order of their numbers",
        )
    number = {name.strip().casefold(): first + place for place, name in enumerate(names)}
    # Try longer names first, since one name may be a prefix of another.
    choices = "|".join(re.escape(name) for name in sorted(number, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{choices})(?!\w)")

    def read(text: str) -> int | None:
        name = _last_match(pattern, text.casefold())
        return None if name is None else number[name]

    return read


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    last = None
    for match in pattern.finditer(text):
        last = match[0]
    return last
