"""A server on the running event loop: uvicorn's connections, with deadlines and bounds that it does not have."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rlhf_core.distributed import stop_signals

from .servers import ServerLimits, bound_socket

MAX_HEADER_BYTES = 32 * 1024
MAX_PIPELINED_BYTES = 256 * 1024
"""Of its next request, a client may send so much before the first is answered."""
_BACKLOG = 128
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_POLL_SECONDS = 0.02


class BoundedConnection(H11Protocol):
    """A client's connection. It is cut where the client sends a request, or takes a response, too slowly.

    The deadline of a request begins with its first byte and holds for its body too, also where the response came before
    the body was read.
    """

    def __init__(self, *, limits: ServerLimits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self.logger = logging.getLogger("rlhf.web")
        self.access_log = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        self._expect(self._limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._expect(self._limits.idle_seconds)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering:
            self._expect(None)
            # uvicorn reads no further until the response is made, and would not notice that the client leaves.
            if len(self.conn.trailing_data[0]) < MAX_PIPELINED_BYTES:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        if not self.cycle.more_body:
            self._expect(self._limits.idle_seconds)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect(self._limits.idle_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect(None if self._is_answering else self._limits.idle_seconds)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether a request has come whole, and its response has not left."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _should_upgrade(self) -> bool:
        return False

    def _expect(self, seconds: float | None) -> None:
        """Cut the connection after so long, unless called again."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class WebServer:
    """Serves an application, on the event loop that `listen` is called on."""

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_keep_alive=int(limits.idle_seconds) + 1,  # after the connection's own deadline
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._state = ServerState()
        self._connect = partial(BoundedConnection, limits=limits, config=config, server_state=self._state, app_state={})
        self._listening: asyncio.Server | None = None
        self.address = ""
        """`http://HOST:PORT`"""

    async def listen(self, host: str, port: int, *, where: str) -> None:
        """Listen; port 0 takes a free one. Raises `UserInputError`, as `where`."""
        bound = bound_socket(host, port, where=where)
        host, port = bound.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._listening = await asyncio.get_running_loop().create_server(self._connect, sock=bound, backlog=_BACKLOG)

    def close(self) -> None:
        """Listen no more and cut all connections, at once."""
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def stop(self, grace_seconds: float) -> bool:
        """Take no more requests, let those in flight end. False where some had to be cut at the deadline."""
        deadline = time.monotonic() + grace_seconds
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        while self._state.connections and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        whole = not self._state.connections
        self.close()
        return whole


def serve_until_stopped(
    app: ASGIApp,
    limits: ServerLimits,
    *,
    host: str,
    port: int,
    where: str,
    ready: Callable[[str], None],
    grace_seconds: float = 1.0,
) -> bool:
    """Serve until SIGINT, SIGTERM or SIGHUP; a second one ends the process at once.

    ready: called with the address, once it listens. Returns `WebServer.stop`. Raises `UserInputError`, as `where`.
    """

    async def serve() -> bool:
        loop, asked = asyncio.get_running_loop(), asyncio.Event()

        def ask_to_stop() -> None:
            for number in stop_signals():
                loop.remove_signal_handler(number)
            asked.set()

        for number in stop_signals():
            loop.add_signal_handler(number, ask_to_stop)
        server = WebServer(app, limits)
        await server.listen(host, port, where=where)
        ready(server.address)
        await asked.wait()
        return await server.stop(grace_seconds)

    return asyncio.run(serve())
