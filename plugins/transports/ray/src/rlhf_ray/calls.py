"""Calling the coordinator, from the driver or from another actor: with a deadline, and with its errors as they are."""

from __future__ import annotations

from typing import Any

import ray

from rlhf_core.errors import DeadlineError, RlhfError

from .failures import explain

_MARGIN_SECONDS = 60.0
"""How much longer than the coordinator's own deadline its answer may take."""


def ask(coordinator: Any, method: str, *arguments: Any, wait_seconds: float = 0.0) -> Any:
    """Call the coordinator, which answers within `wait_seconds` by itself. Raises what it raised or that it is gone."""
    return answer(getattr(coordinator, method).remote(*arguments), method, wait_seconds)


def answer(reference: Any, method: str, wait_seconds: float = 0.0) -> Any:
    """What the coordinator answers to a call of `method` that is under way; as `ask`."""
    try:
        return ray.get(reference, timeout=wait_seconds + _MARGIN_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(
            f"the coordinator did not answer {method} within {wait_seconds + _MARGIN_SECONDS:g} s", where="coordinator"
        ) from error
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        # As it was raised: otherwise Ray would wrap it again on its way on, and who failed would no longer be clear.
        raise cause if isinstance(cause, RlhfError) else explain("coordinator", error) from None
