"""Forwards connections from the port inside the sandbox to the episode's endpoint."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_CONNECT_SECONDS = 60.0
"""Deadline of a connection, which a busy event loop may delay. A server that has ended refuses it at once."""
_CLOSE_SECONDS = 5.0
_MAX_CONNECTIONS = 16
"""Connections that are accepted at once. Others wait in the queue of the listening socket."""
_RETRY_SECONDS = 0.2
_CHUNK = 2**16


class Forwarder:
    """Connects a listening socket with an endpoint. All methods are called on one event loop."""

    def __init__(self, base_url: str) -> None:
        """Forward nothing yet.

        Args:
            base_url: URL of the endpoint.
        """
        place = urlsplit(base_url)
        assert place.hostname is not None and place.port is not None
        self._host, self.port = place.hostname, place.port
        self.num_connections = 0
        """Number of connections that the program has opened."""
        self.fault: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the endpoint cannot be reached, once it cannot."""
        self._slots = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, listener: socket.socket) -> None:
        """Accept connections. Takes over the listening socket."""
        listener.setblocking(False)
        self._keep(self._accept(listener))

    def stop(self) -> None:
        """Stop listening and close all connections."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connections are closed."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept a connection whenever a slot is free, so that the program cannot use up this process's open files."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                await self._slots.acquire()
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:  # no open file is left, or the program has left
                    self._slots.release()
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                self.num_connections += 1
                self._keep(self._forward(connection)).add_done_callback(lambda _: self._slots.release())

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _forward(self, connection: socket.socket) -> None:
        writers = []
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            writers.append(writer)
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    answers, requests = await asyncio.open_connection(self._host, self.port)
            except OSError as error:  # includes TimeoutError
                if not self.fault.done():
                    self.fault.set_result(str(error) or f"no connection within {_CONNECT_SECONDS:g} s")
                return
            writers.append(requests)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, requests))
                both.create_task(_copy(answers, writer))
        finally:
            for each in writers:
                each.transport.abort() if each.transport.is_closing() else each.close()
            if not writers:
                connection.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the source ends or one side closes, then end the target's input."""
    with suppress(OSError):
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
        target.write_eof()
