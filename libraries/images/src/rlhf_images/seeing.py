"""Whether a model can receive images."""

from __future__ import annotations

from rlhf_core.models.kinds import owner_of


def is_known_kind(path: str) -> bool:
    """Return whether an installed kind of model claims a path. Others are text models, which read markers as text.

    Args:
        path: `model.path` of a run.

    Example:
        >>> is_known_kind("builtin:tiny-digits")
        False
    """
    return owner_of(path) is not None
