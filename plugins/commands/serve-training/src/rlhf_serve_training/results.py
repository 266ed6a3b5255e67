"""Results of requests, and clients that wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from rlhf_web import Refused

from .store import Store


class Results:
    """Waits for results on the event loop, which the thread that carries out requests notifies."""

    def __init__(self, store: Store) -> None:
        """Create the object.

        Args:
            store: the journal.
        """
        self._store = store
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Use the running event loop."""
        self._loop = asyncio.get_running_loop()

    def notify(self, request_ids: Sequence[str]) -> None:
        """Wake the clients that wait for finished requests. Called on any thread.

        Args:
            request_ids: ids of the requests.
        """

        def wake() -> None:
            for request_id in request_ids:
                for event in self._waiters.pop(request_id, ()):
                    event.set()

        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the server ends
                self._loop.call_soon_threadsafe(wake)

    async def get(self, tenant: str, request_id: str, seconds: float) -> tuple[str, bytes] | None:
        """Return the type and content of a result, or None if it is not finished in time. Raises `Refused`.

        Args:
            tenant: the tenant of the request.
            request_id: id of the request.
            seconds: maximum wait.
        """
        event, deadline = asyncio.Event(), time.monotonic() + seconds
        self._waiters.setdefault(request_id, set()).add(event)
        try:
            while True:
                event.clear()
                row = self._store.row(
                    "SELECT status, type, result FROM requests WHERE id=? AND tenant=?", request_id, tenant
                )
                if row is None:
                    raise Refused(404, "not_found", f"the request {request_id} does not exist")
                if row["status"] != "queued":
                    if row["result"] is None:
                        raise Refused(410, "gone", f"the result of {request_id} is not stored any more")
                    return row["type"], row["result"]
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                try:
                    await asyncio.wait_for(event.wait(), remaining)
                except TimeoutError:
                    return None
                self._waiters.setdefault(request_id, set()).add(event)
        finally:
            left = self._waiters.get(request_id)
            if left is not None:
                left.discard(event)
                if not left:
                    self._waiters.pop(request_id, None)
