"""Finds the specification of a hook by its event's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_core.hookspecs import PREFIX, SPECS


def spec_function(event: str) -> Callable[..., Any]:
    """Return the function of `hookspecs` for an event (the name without prefix)."""
    return next(vars(spec)[f"{PREFIX}{event}"] for spec in SPECS.values() if f"{PREFIX}{event}" in vars(spec))
