"""State of hook plugins and rewards that checkpoints keep: `state_dict()` and `load_state_dict(state)`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import HookError, RlhfError

logger = logging.getLogger("rlhf")


def state_of(parts: Mapping[str, object]) -> dict[str, Any]:
    """Return name -> state of each part with a `state_dict`: tensors and plain values, as a checkpoint stores them.

    Raises `HookError` if one fails.
    """
    return {name: _call(name, part, "state_dict") for name, part in parts.items() if _keeps_state(part)}


def load_state_of(parts: Mapping[str, object], states: Mapping[str, Any]) -> None:
    """Restore the state of each part. Raises `HookError` if one fails. A part without a saved state starts fresh."""
    for name, part in parts.items():
        if name in states and _keeps_state(part):
            _call(name, part, "load_state_dict", states[name])
    for name in states.keys() - parts.keys():
        logger.warning("the checkpoint has a state of %s, which this run does not have", name)


def _keeps_state(part: object) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _call(name: str, part: object, method: str, *arguments: Any) -> Any:
    try:
        return getattr(part, method)(*arguments)
    except RlhfError:
        raise
    except Exception as error:
        raise HookError(f"{method} raised {type(error).__name__}: {error}", where=name) from error
