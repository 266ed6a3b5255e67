"""Connections with deadlines: uvicorn itself waits for a first request as long as the client likes."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """Closed when its next request is not complete, or its response not taken, in time."""

    request_seconds = 10.0
    """From the connection's begin, or the end of the response before, to the end of a request's headers."""
    response_seconds = 60.0
    """For a response to be made and taken by the client."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self.request_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect(None)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._expect(self.response_seconds)

    def on_response_complete(self) -> None:
        before = self.cycle
        super().on_response_complete()
        self._expect(self.request_seconds if self.cycle is before else self.response_seconds)

    def _expect(self, seconds: float | None) -> None:
        """Abort the connection after so long, unless called again."""
        if self._deadline is not None:
            self._deadline.cancel()
        if seconds is not None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(seconds, self.transport.abort)
