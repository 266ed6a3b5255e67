"""The server: listens, asks every request for its key, and has the key's owner answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

import h11

from rlhf_episodes import Answer, Answering, Call, CallRefused, EndpointServer, FindKey
from rlhf_web import ServerLimits, bound_socket

from .connection import JSON, BytesInFlight, ClientLeft, Head, HttpConnection
from .protocol import (
    HEALTH_PATH,
    MODELS_PATH,
    POLICY,
    READERS,
    Asked,
    answer_body,
    answer_events,
    encode,
    error_body,
    models_body,
)

logger = logging.getLogger("rlhf.serve")

_BACKLOG = 128
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Server:
    """Serves the owners of keys on one event loop (`EndpointServer`)."""

    def __init__(self, find_key: FindKey, limits: ServerLimits, model: str | None) -> None:
        """model: the only name that requests may give; without one any will do."""
        self._find_key = find_key
        self._limits = limits
        self._model = model
        # A template may render ids, and episodes have to repeat: in a run they are made of the turn alone.
        self._ids_begin = "" if model is None else f"{secrets.token_hex(8)}-"
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
            if head.path == HEALTH_PATH:
                await self._respond_to_get(connection, head, encode({"status": "ok"}))
                return
            owner = self._owner(head)
            if head.path == MODELS_PATH:
                await self._respond_to_get(connection, head, models_body(self._model or POLICY))
                return
            asked = await self._asked(connection, head)
            answers = await connection.while_it_stays(_answers_of(owner, asked.calls))
        except CallRefused as refused:
            again = [("retry-after", "1")] if refused.status == 503 else []
            await connection.respond(
                refused.status, error_body(refused), closes=not connection.has_read_all, headers=again
            )
            return
        reply_id = f"{self._ids_begin}{answers[0].turn}"
        if asked.streams:
            await connection.stream(answer_events(asked, answers, reply_id))
        else:
            await connection.respond(200, answer_body(asked, answers, reply_id))

    async def _respond_to_get(self, connection: HttpConnection, head: Head, body: bytes) -> None:
        """Raises `CallRefused` for another method, or with a body."""
        if head.method != "GET":
            raise CallRefused(405, "method_not_allowed", f"{head.path} takes GET")
        if head.headers.get("content-length", "0") != "0" or "transfer-encoding" in head.headers:
            raise CallRefused(413, "request_too_large", f"{head.path} takes no body")
        await connection.body()
        await connection.respond(200, body)

    def _owner(self, head: Head) -> Answering:
        """Whose key it brings, for a request that may be made. Raises `CallRefused`."""
        owner = self._find_key(head.key)
        if owner is None:
            raise CallRefused(401, "invalid_api_key", "the key is missing or wrong, or its episode is over")
        if head.path == MODELS_PATH:
            return owner
        if head.path not in READERS:
            raise CallRefused(404, "not_found", f"there are {', '.join(READERS)}, {MODELS_PATH} and {HEALTH_PATH}")
        if head.method != "POST":
            raise CallRefused(405, "method_not_allowed", f"{head.path} takes POST")
        if head.media_type != JSON:
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
                asked = read(await connection.body())
        except asyncio.TimeoutError as error:
            raise CallRefused(503, "busy", "too many large requests at once") from error
        if self._model is not None and asked.model not in (None, self._model):
            message = f"the model {asked.model!r} does not exist: this server has {self._model!r}"
            raise CallRefused(404, "model_not_found", message)
        return replace(asked, model=asked.model or self._model or POLICY)


async def _answers_of(owner: Answering, calls: Sequence[Call]) -> list[Answer]:
    """All answers, in the order of the calls. Where one is refused, the others are cancelled."""
    tasks = [asyncio.ensure_future(_answer_of(owner, call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


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
    find_key: FindKey, *, host: str, port: int, limits: ServerLimits, model: str | None = None
) -> EndpointServer:
    """Start the server; the entry point `openai` of `rlhf.endpoints` (`StartServer`).

    model: the only name that requests may give; without one any will do.
    """
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
