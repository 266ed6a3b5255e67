"""The bytes that a tenant uses on disk, against its limit."""

from __future__ import annotations

import time

from rlhf_web import Refused

from .limits import Limits
from .store import Store

_KNOWN_SECONDS = 5.0
"""Time for which a sum is used again, since many requests may arrive at once."""


class DiskUse:
    """Refuses requests of tenants whose disk is full. Used on the event loop."""

    def __init__(self, store: Store, limits: Limits) -> None:
        """Create the object.

        Args:
            store: the journal.
            limits: limits for each tenant.
        """
        self._store, self._limit = store, 2 * limits.disk_bytes
        self._known: dict[str, tuple[float, int]] = {}

    def check(self, tenant: str, size: int = 0) -> None:
        """Raise `Refused` if a tenant's disk is full.

        Args:
            tenant: name of the tenant.
            size: bytes that a request would add.
        """
        known = self._known.get(tenant)
        if known is None or time.monotonic() - known[0] > _KNOWN_SECONDS:
            known = self._known[tenant] = (time.monotonic(), self._store.used_bytes(tenant))
        if known[1] + size > self._limit:
            raise Refused(429, "disk_full", "the disk limit is reached, delete checkpoints")

    def check_session(self, tenant: str) -> None:
        """Raise `Refused` if a tenant may not create a session: at one and a half times the limit.

        A client of the SDK needs a session to delete checkpoints.

        Args:
            tenant: name of the tenant.
        """
        self.check(tenant, -self._limit // 2)
