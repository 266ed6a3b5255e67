"""One HTTP connection of a client: requests read within bounds and a deadline, responses written likewise."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import h11

from rlhf_web import ServerLimits

logger = logging.getLogger("rlhf.serve")

MAX_HEADER_BYTES = 32 * 1024
CHUNK_BYTES = 64 * 1024
MAX_PIPELINED_BYTES = 256 * 1024
JSON = "application/json"
EVENTS = "text/event-stream"
T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed the connection, or was too slow."""


@dataclass(frozen=True, slots=True)
class Head:
    """A request up to its body."""

    method: str
    path: str
    headers: Mapping[str, str]
    """By name in lower case; of several with one name the last."""

    @property
    def key(self) -> str:
        """The key that it brings; empty without one."""
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class HttpConnection:
    """HTTP over one stream. A request has one deadline, which begins with its first byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: ServerLimits) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(0)  # what was waited for has left
        self._limits = limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._deadline: float | None = None
        self._wants_body = True

    async def next_head(self) -> Head | None:
        """The next request; None where the client closed the connection in between.

        Raises `ClientLeft`, and `h11.RemoteProtocolError` for what is no HTTP.
        """
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        self._deadline = None
        event = await self._event()
        if not isinstance(event, h11.Request):
            return None
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
        path = event.target.decode("latin-1").partition("?")[0]
        self._wants_body = event.method != b"HEAD"
        return Head(event.method.decode("latin-1"), path, headers)

    async def body(self) -> bytes:
        """All of the body, whose length the caller has bounded. Raises as `next_head`."""
        parts = []
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data)
            parts.append(bytes(event.data))
        return b"".join(parts)

    async def while_it_stays(self, work: Awaitable[T]) -> T:
        """Await `work`; it is cancelled where the client closes the connection. Raises `ClientLeft`."""
        working = asyncio.ensure_future(work)
        hearing = asyncio.ensure_future(self._until_it_leaves())
        try:
            await asyncio.wait({working, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientLeft
            return working.result()
        finally:
            working.cancel()
            hearing.cancel()
            await asyncio.wait({working, hearing})
            for each in (working, hearing):
                if not each.cancelled():
                    each.exception()  # nobody else will ask for it

    async def _until_it_leaves(self) -> None:
        """Return once the client closed the connection. What it sends before is of its next request.

        A client that has sent `MAX_PIPELINED_BYTES` is read no further until its first request is answered.
        """
        num_bytes = 0
        while data := await self._reader.read(CHUNK_BYTES):
            self._http.receive_data(data)
            num_bytes += len(data)
            if num_bytes >= MAX_PIPELINED_BYTES:
                await asyncio.Event().wait()  # never set: `while_it_stays` cancels this

    async def respond(
        self, status: int, body: bytes, *, closes: bool = False, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """A whole response; with `closes` the last one. Raises `ClientLeft`."""
        ends = [("connection", "close")] if closes else []
        given = [("content-type", JSON), ("content-length", str(len(body))), *headers, *ends]
        content = [h11.Data(data=body)] if self._wants_body else []
        await self._send(h11.Response(status_code=status, headers=given), *content, h11.EndOfMessage())

    async def stream(self, events: Iterable[bytes]) -> None:
        """A response event by event. Raises `ClientLeft`."""
        await self._send(
            h11.Response(status_code=200, headers=[("content-type", EVENTS), ("cache-control", "no-store")])
        )
        for event in events:
            await self._send(h11.Data(data=event))
        await self._send(h11.EndOfMessage())

    @property
    def can_respond(self) -> bool:
        """Whether a response is due and none has begun."""
        return self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def has_read_all(self) -> bool:
        """Whether the request was read to its end."""
        return self._http.their_state is h11.DONE

    @property
    def goes_on(self) -> bool:
        """Whether another request may follow."""
        return self._http.our_state is h11.DONE and self.has_read_all

    async def read_past(self) -> None:
        """Let go of what the client still sends: closing at once would take the response away from it."""
        try:
            if self._writer.can_write_eof():
                self._writer.write_eof()
            while await self._read():
                pass
        except (ClientLeft, OSError) as error:
            logger.debug("a client left: %s", error)

    async def _event(self) -> object:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._read())

    async def _read(self) -> bytes:
        loop = asyncio.get_running_loop()
        seconds = self._limits.idle_seconds if self._deadline is None else self._deadline - loop.time()
        try:
            data = await asyncio.wait_for(self._reader.read(CHUNK_BYTES), max(0.0, seconds))
        except (asyncio.TimeoutError, OSError) as error:
            raise ClientLeft from error
        if self._deadline is None:
            self._deadline = loop.time() + self._limits.idle_seconds
        return data

    async def _send(self, *events: h11.Event) -> None:
        data = [self._http.send(event) for event in events]
        self._writer.write(b"".join(part for part in data if part))
        try:
            await asyncio.wait_for(self._writer.drain(), self._limits.idle_seconds)
        except (asyncio.TimeoutError, OSError) as error:
            raise ClientLeft from error


class BytesInFlight:
    """A bound on the bodies that are read and parsed at once."""

    def __init__(self, limits: ServerLimits) -> None:
        self._most = limits.max_bytes_in_flight
        self._seconds = limits.idle_seconds
        self._taken = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def place(self, num_bytes: int) -> AsyncIterator[None]:
        """Room for a body; one that is larger than all room waits until it is alone. Raises `asyncio.TimeoutError`."""
        async with self._changed:
            fits = self._changed.wait_for(lambda: not self._taken or self._taken + num_bytes <= self._most)
            await asyncio.wait_for(fits, self._seconds)
            self._taken += num_bytes
        try:
            yield
        finally:
            self._taken -= num_bytes
            async with self._changed:
                self._changed.notify_all()
