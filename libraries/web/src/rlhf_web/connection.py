"""A server on the running event loop, based on uvicorn with additional deadlines and limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
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
"""Maximum data that a client may send of its next request before the current one is answered."""
_BACKLOG = 128
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_POLL_SECONDS = 0.02
_STOP_POLL_SECONDS = 0.25


class BoundedConnection(H11Protocol):
    """A client's connection, closed if the client sends a request or reads a response too slowly.

    The deadline of a request begins with its first byte and includes its body, even if the response is sent before the
    body was read.
    """

    def __init__(self, *, limits: ServerLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self.logger = logging.getLogger("rlhf.web")
        self.access_log = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        self._set_deadline(self._limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._set_deadline(self._limits.idle_seconds)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering:
            self._set_deadline(None)
            # uvicorn stops reading until it has the response, and would not notice that the client disconnects.
            if len(self.conn.trailing_data[0]) < MAX_PIPELINED_BYTES:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        if not self.cycle.more_body:
            self._set_deadline(self._limits.idle_seconds)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline(self._limits.idle_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_deadline(None if self._is_answering else self._limits.idle_seconds)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether a complete request has arrived whose response is not completely sent."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _should_upgrade(self) -> bool:
        return False

    def _set_deadline(self, seconds: float | None) -> None:
        """Close the connection after this time unless called again. None removes the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class WebServer:
    """Serves an application on the event loop that calls `listen`.

    Example:
        server = WebServer(app, ServerLimits())
        await server.listen("127.0.0.1", 0, where="my server")
        print(server.address)
        all_finished = await server.stop(grace_seconds=5.0)
    """

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        """Create the server. It accepts connections after `listen`.

        Args:
            app: an ASGI application, such as a `Guard`.
            limits: limits on connections and time.
        """
        config = uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_keep_alive=int(limits.idle_seconds) + 1,  # later than the deadline of `BoundedConnection`
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._state = ServerState()
        self._connect = partial(BoundedConnection, limits=limits, config=config, server_state=self._state, app_state={})
        self._listening: asyncio.Server | None = None
        self.address = ""
        """`http://HOST:PORT`"""

    async def listen(self, host: str, port: int, *, where: str) -> None:
        """Listen at an address. Port 0 selects a free port.

        Raises `UserInputError`, with `where` as its location, if the address cannot be used.
        """
        listener = bound_socket(host, port, where=where)
        host, port = listener.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._listening = await asyncio.get_running_loop().create_server(self._connect, sock=listener, backlog=_BACKLOG)

    def close(self) -> None:
        """Stop listening and close all connections immediately."""
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def stop(self, grace_seconds: float) -> bool:
        """Stop listening and wait for requests in flight. Returns False if some had to be aborted at the deadline."""
        deadline = time.monotonic() + grace_seconds
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        while self._state.connections and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        all_finished = not self._state.connections
        self.close()
        return all_finished


def serve_until_stopped(
    app: ASGIApp,
    limits: ServerLimits,
    *,
    host: str,
    port: int,
    where: str,
    ready: Callable[[str], None],
    grace_seconds: float = 1.0,
    stops: Callable[[], bool] = lambda: False,
) -> bool:
    """Serve until SIGINT, SIGTERM or SIGHUP. A second signal ends the process immediately.

    Args:
        app: an ASGI application, such as a `Guard`.
        limits: limits on connections and time.
        host: address to listen at.
        port: port to listen at. 0 selects a free port.
        where: location named in the `UserInputError` that is raised if the address cannot be used.
        ready: called with the address `http://HOST:PORT` when the server listens.
        grace_seconds: time for requests in flight to finish after the first signal.
        stops: polled on the event loop. A true result ends the server as a signal does.

    Returns:
        Whether all requests in flight finished in time.
    """

    async def serve() -> bool:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()

        def request_stop() -> None:
            for number in stop_signals():
                loop.remove_signal_handler(number)
            stopping.set()

        for number in stop_signals():
            loop.add_signal_handler(number, request_stop)
        server = WebServer(app, limits)
        await server.listen(host, port, where=where)
        ready(server.address)
        while not (stopping.is_set() or stops()):
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _STOP_POLL_SECONDS)
        return await server.stop(grace_seconds)

    return asyncio.run(serve())
