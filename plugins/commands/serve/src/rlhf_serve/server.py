"""The server: listens, asks every request for its key, and has the key's owner answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import h11

from rlhf_core.environments import Answer, Answering, Call, CallRefused, EndpointServer, FindKey
from rlhf_core.util import ServerLimits, bound_socket

from .connection import JSON, BytesInFlight, ClientLeft, Head, HttpConnection
from .protocol import MODELS_PATH, READERS, Asked, answer_body, answer_events, error_body, models_body

logger = logging.getLogger("rlhf.serve")

_BACKLOG = 128
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Server:
    """Serves the owners of keys on one event loop (`EndpointServer`)."""

    def __init__(self, find_key: FindKey, limits: ServerLimits, model: str) -> None:
        self._find_key = find_key
        self._limits = limits
        self._model = model
        self._in_flight = BytesInFlight(limits)
        self._connections: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None
        self._address = ("", 0)

    @property
    def base_url(self) -> str:
        """See `EndpointServer`."""
        host, port = self._address
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    async def listen(self, listening: socket.socket) -> None:
        """Serve whoever connects to a socket that is bound already."""
        host, port = listening.getsockname()[:2]
        self._address = (host, port)
        self._listening = await asyncio.start_server(self._serve, sock=listening, backlog=_BACKLOG)

    def close(self) -> None:
        """See `EndpointServer`."""
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._connections):
            connection.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self._limits.max_connections:
            writer.write(_TOO_MANY)
            writer.close()
            return
        self._connections.add(writer)
        connection = HttpConnection(reader, writer, self._limits)
        try:
            while (head := await connection.next_head()) is not None:
                await self._answer(connection, head)
                if not connection.goes_on:
                    await connection.read_past()
                    break
        except h11.RemoteProtocolError as error:
            await self._refuse_garbage(connection, error)
        except (ClientLeft, ConnectionError) as error:
            logger.debug("a client left: %s", error)
        except Exception:
            logger.exception("a request failed")
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _refuse_garbage(self, connection: HttpConnection, error: h11.RemoteProtocolError) -> None:
        if not connection.can_respond:
            return
        refused = CallRefused(error.error_status_hint, "invalid_request", f"this is no HTTP: {error}")
        try:
            await connection.respond(refused.status, error_body(refused), closes=True)
            await connection.read_past()
        except (ClientLeft, h11.LocalProtocolError, ConnectionError) as left:
            logger.debug("a client left: %s", left)

    async def _answer(self, connection: HttpConnection, head: Head) -> None:
        try:
            owner = self._owner(head)
            if head.path == MODELS_PATH:
                if head.headers.get("content-length", "0") != "0" or "transfer-encoding" in head.headers:
                    raise CallRefused(413, "request_too_large", f"{MODELS_PATH} takes no body")
                await connection.body()
                await connection.respond(200, models_body(self._model))
                return
            asked = await self._asked(connection, head)
            answer = await connection.while_it_stays(_answer_of(owner, asked.call))
        except CallRefused as refused:
            again = [("retry-after", "1")] if refused.status == 503 else []
            await connection.respond(
                refused.status, error_body(refused), closes=not connection.has_read_all, headers=again
            )
            return
        if asked.streams:
            await connection.stream(answer_events(asked, answer))
        else:
            await connection.respond(200, answer_body(asked, answer))

    def _owner(self, head: Head) -> Answering:
        """Whose key it brings, for a request that may be made. Raises `CallRefused`."""
        owner = self._find_key(head.key)
        if owner is None:
            raise CallRefused(401, "invalid_api_key", "the key is missing or wrong, or its episode is over")
        wanted = {MODELS_PATH: "GET", **dict.fromkeys(READERS, "POST")}.get(head.path)
        if wanted is None:
            raise CallRefused(404, "not_found", f"there are {', '.join(READERS)} and {MODELS_PATH}")
        if head.method != wanted:
            raise CallRefused(405, "method_not_allowed", f"{head.path} takes {wanted}")
        if wanted == "POST" and head.media_type != JSON:
            raise CallRefused(415, "unsupported_media_type", f"send {JSON}")
        return owner

    async def _asked(self, connection: HttpConnection, head: Head) -> Asked:
        """The call of a request. Raises `CallRefused`."""
        length = head.headers.get("content-length", "")
        most = self._limits.max_body_bytes
        if not (length.isascii() and length.isdigit()) or "transfer-encoding" in head.headers:
            raise CallRefused(411, "length_required", "say Content-Length; a body in chunks is not taken")
        if len(length) > 18 or int(length) > most:
            raise CallRefused(413, "request_too_large", f"a body has at most {most} bytes")
        read: Callable[[bytes], Asked] = READERS[head.path]
        try:
            async with self._in_flight.place(int(length)):
                return read(await connection.body())
        except asyncio.TimeoutError as error:
            raise CallRefused(503, "busy", "too many large requests at once") from error


async def _answer_of(owner: Answering, call: Call) -> Answer:
    """The owner's answer. Every error of the owner becomes `CallRefused`."""
    try:
        return await owner.answer(call)
    except CallRefused:
        raise
    except Exception as error:
        logger.exception("a call failed")
        raise CallRefused(500, "internal_error", f"it could not be answered ({type(error).__name__})") from error


async def start(
    find_key: FindKey, *, host: str, port: int, limits: ServerLimits, model: str = "policy"
) -> EndpointServer:
    """Start the server; the entry point `openai` of `rlhf.endpoints` (`StartServer`)."""
    server = Server(find_key, limits, model)
    listening = bound_socket(host, port, where="the endpoint")
    listening.setblocking(False)
    try:
        await server.listen(listening)
    except BaseException:
        server.close()
        listening.close()
        raise
    return server
