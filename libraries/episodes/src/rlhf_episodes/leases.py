"""Resources that several players of a process share, such as the weights of a model.

A run builds a player for training and one for each set and mode of an evaluation. They do not know of each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    """A resource."""

    def close(self) -> None:
        """Release it."""


ResourceT = TypeVar("ResourceT", bound=Closable)


@dataclass(slots=True)
class _Opened:
    resource: Any
    num_users: int = 0


class Leases:
    """Opens a resource for its first user and closes it with its last one. Thread-safe."""

    def __init__(self) -> None:
        """Start without resources."""
        self._lock = Lock()
        self._opened: dict[str, _Opened] = {}

    def acquire(self, key: str, build: Callable[[], ResourceT]) -> ResourceT:
        """Return the resource of `key`, built if no one uses it. Raises the errors of `build`."""
        with self._lock:
            opened = self._opened.get(key)
            if opened is None:
                opened = self._opened[key] = _Opened(build())
            opened.num_users += 1
        resource: ResourceT = opened.resource
        return resource

    def release(self, key: str) -> None:
        """End one use, and close the resource if it was the last."""
        with self._lock:
            opened = self._opened[key]
            opened.num_users -= 1
            if opened.num_users:
                return
            del self._opened[key]
        opened.resource.close()


def lease_key(*parts: Any) -> str:
    """Return the key of a resource that is built from `parts`, which are JSON values."""
    return json.dumps(parts, sort_keys=True, default=str)


OF_PROCESS = Leases()
"""Resources of this process."""
