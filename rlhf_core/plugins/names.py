"""Names for hints: the distribution that provides a plugin of this project, and new names of those that moved."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

KNOWN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))
"""Kind -> name of a plugin -> the distribution that provides it."""
_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


@cache
def moved_names() -> dict[str, str]:
    """Return old dotted name -> new dotted name, for modules and names that a package exported."""
    names: dict[str, str] = json.loads(Path(__file__).with_name("moved.json").read_text(encoding="utf-8"))
    return names


def moved_hint(error: BaseException) -> str | None:
    """Return what to import instead, if a failed import names something that moved, else None.

    Example:
        >>> moved_hint(ModuleNotFoundError("No module named 'rlhf_core.testing'", name="rlhf_core.testing"))
        'rlhf_core.testing is now rlhf_testing, from the distribution rlhf-testing'
    """
    if not isinstance(error, ImportError):
        return None
    name = _NAME.match(str(error))
    old = f"{name[2]}.{name[1]}" if name else str(error.name)
    new = moved_names().get(old)
    if new is None:
        return None
    distribution = new.partition(".")[0].replace("_", "-")
    return f"{old} is now {new}, from the distribution {distribution}"
