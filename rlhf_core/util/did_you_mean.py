"""Suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def fold(name: str) -> str:
    """Normalize a name for comparison: lower case, `_` as `-`."""
    return name.strip().lower().replace("_", "-")


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, or None if none is close."""
    folded = {fold(candidate): candidate for candidate in known}
    matches = get_close_matches(fold(name), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that suggests the known name closest to `name`, or an empty string.

    Args:
        name: the mistyped name.
        known: valid names.

    Example:
        >>> 'did you mean "exact-match"?' in suggestion("exact_macth", ["exact-match", "regex"])
        True
    """
    match = closest(name, known)
    return f'; did you mean "{match}"?' if match else ""
