"""The reference model: the start policy, run forward only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Reference:
    """The start policy, run forward only."""

    model: nn.Module
    context: Callable[[], AbstractContextManager[Any]]
    """Context of its forward: switches the adapter off where the reference is the policy itself."""
