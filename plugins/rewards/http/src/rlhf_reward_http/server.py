"""A server of one reward: bounded in connections, requests in flight and body size, and stopped in good order."""

from __future__ import annotations

import hmac
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlhf_core.errors import RewardError
from rlhf_core.types import Rollout
from rlhf_web import ServerLimits

from .protocol import (
    CONTENT_TYPE,
    HEALTH_PATH,
    SCORE_PATH,
    ProtocolError,
    decode_request,
    encode_error,
    encode_response,
)

logger = logging.getLogger("rlhf.serve_reward")

Score = Callable[[Sequence[Rollout]], Sequence[float | None]]
_CHUNK_BYTES = 64 * 1024
_RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardServerLimits(ServerLimits):
    """Limits on the server's memory: the bodies held at a time have `max_bytes_in_flight` together.

    A body is parsed to Python objects, which take up to about 25 times its bytes. Each connection has a thread.
    """

    max_in_flight: int = 8
    """Requests read and scored at once; others wait `wait_seconds` for their turn, then get 503."""
    wait_seconds: float = 2.0


@dataclass(slots=True)
class ServerCounts:
    """Counts of the server's work."""

    scored_requests: int = 0
    scored_samples: int = 0
    failed: int = 0
    """The reward failed."""
    refused: int = 0
    """Told to come again later."""
    most_in_flight: int = 0


class RewardServer(ThreadingHTTPServer):
    """Serves `score` by the protocol. `serve_forever` in one thread, `stop` from another."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], score: Score, *, limits: RewardServerLimits, token: str | None = None
    ) -> None:
        """Raises `OSError` where the address cannot be bound."""
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.score = score
        self.limits = limits
        self.token = token
        self.counts = ServerCounts()
        self.in_flight = 0
        self._bytes_in_flight = 0
        self._changed = threading.Condition()
        self._connections: set[Any] = set()

    @contextmanager
    def place(self, num_bytes: int) -> Iterator[bool]:
        """A place among the requests in flight for a body of `num_bytes`; False where none became free in time."""

        def is_free() -> bool:
            bytes_then = self._bytes_in_flight + num_bytes
            fits = bytes_then <= self.limits.max_bytes_in_flight or self.in_flight == 0
            return self.in_flight < self.limits.max_in_flight and fits

        with self._changed:
            has_place = self._changed.wait_for(is_free, self.limits.wait_seconds)
            if has_place:
                self.in_flight += 1
                self._bytes_in_flight += num_bytes
                self.counts.most_in_flight = max(self.counts.most_in_flight, self.in_flight)
        if not has_place:
            self.count(refused=1)
            yield False
            return
        try:
            yield True
        finally:
            with self._changed:
                self.in_flight -= 1
                self._bytes_in_flight -= num_bytes
                self._changed.notify_all()

    def count(self, *, requests: int = 0, samples: int = 0, failed: int = 0, refused: int = 0) -> None:
        """Add to the counts."""
        with self._changed:
            self.counts.scored_requests += requests
            self.counts.scored_samples += samples
            self.counts.failed += failed
            self.counts.refused += refused

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, or a refusal where there are too many."""
        with self._changed:
            has_room = len(self._connections) < self.limits.max_connections
            if has_room:
                self._connections.add(request)
        if has_room:
            super().process_request(request, client_address)
            return
        self.count(refused=1)
        request.settimeout(1.0)
        try:
            request.sendall(
                b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: %d\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                % _RETRY_AFTER_SECONDS
            )
        except OSError as error:
            logger.debug("a refused connection was gone already: %s", error)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """The connection is done with."""
        super().shutdown_request(request)
        with self._changed:
            self._connections.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is its client's affair; in place of a traceback on stderr."""
        logger.debug("a connection ended", exc_info=True)

    def stop(self, grace_seconds: float) -> bool:
        """Take no more requests, let those in flight end. False where some were still running at the deadline."""
        self.shutdown()
        self.server_close()
        with self._changed:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RD)  # idle ones end; those being scored can still answer
                except OSError as error:
                    logger.debug("a connection was gone already: %s", error)
            return self._changed.wait_for(lambda: not self._connections, grace_seconds)


class _TimedReader(io.RawIOBase):
    """A connection's bytes; each request has one deadline, which begins with its first byte."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._deadline: float | None = None

    def begin(self) -> None:
        """Begin another request."""
        self._deadline = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._seconds if self._deadline is None else self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._seconds
        return count


class _Handler(BaseHTTPRequestHandler):
    """One connection, which may bring many requests."""

    server: RewardServer
    protocol_version = "HTTP/1.1"
    server_version = "rlhf-reward"
    sys_version = ""
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._timed = _TimedReader(self.connection, self.server.limits.idle_seconds)
        self.rfile = io.BufferedReader(self._timed)

    def handle_one_request(self) -> None:
        self._timed.begin()
        super().handle_one_request()

    def do_GET(self) -> None:
        if not self._is_authorised():
            return
        if self.path == HEALTH_PATH:
            self._reply(200, b'{"protocol":1,"status":"ok","in_flight":%d}' % self.server.in_flight)
        else:
            self._refuse(404, f"there is {HEALTH_PATH} to get, and {SCORE_PATH} to post to")

    def do_POST(self) -> None:
        if not self._is_authorised():
            return
        if self.path != SCORE_PATH:
            self._refuse(404, f"post samples to {SCORE_PATH}")
        elif self.headers.get_content_type() != CONTENT_TYPE:  # also keeps web pages of a browser here from asking
            self._refuse(415, f"send {CONTENT_TYPE}")
        elif (length := self._length()) is not None:
            with self.server.place(length) as has_place:
                if has_place:
                    self._score(self._read(length))
                else:
                    self._skip(length)
                    self._reply(503, encode_error("busy"), retry_after=_RETRY_AFTER_SECONDS)

    def _score(self, body: bytes | None) -> None:
        if body is None:
            self.close_connection = True  # the client left, or sends too slowly
            return
        try:
            rollouts = decode_request(body)
        except ProtocolError as error:
            self._reply(400, encode_error(str(error)))
            return
        del body
        try:
            scores = self.server.score(rollouts)
        except RewardError as error:
            logger.warning("%s", error)
            self.server.count(failed=1)
            self._reply(500, encode_error(f"{error.where}: {error.message}"))
            return
        self.server.count(requests=1, samples=len(rollouts))
        self._reply(200, encode_response(scores))

    def _is_authorised(self) -> bool:
        expected = self.server.token
        given = self.headers.get("Authorization", "")
        if expected is None or hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
            return True
        self._refuse(401, "the token is missing or wrong")
        return False

    def _length(self) -> int | None:
        """Bytes of the body; None, and the refusal sent, where they are unknown or too many."""
        text = self.headers.get("Content-Length", "")
        most = self.server.limits.max_body_bytes
        if not (text.isascii() and text.isdigit()) or "Transfer-Encoding" in self.headers:
            self._refuse(411, "say Content-Length; a body in chunks is not taken")
        elif len(text) > 18 or int(text) > most:
            self._refuse(413, f"a body has at most {most} bytes: send fewer samples in a request")
        else:
            return int(text)
        return None

    def _chunks(self, length: int) -> Iterator[bytes]:
        """The body as it comes; ends early where the client leaves or takes too long."""
        while length > 0:
            try:
                chunk = self.rfile.read1(min(length, _CHUNK_BYTES))
            except TimeoutError:
                return
            if not chunk:
                return
            length -= len(chunk)
            yield chunk

    def _read(self, length: int) -> bytes | None:
        body = b"".join(self._chunks(length))
        return body if len(body) == length else None

    def _skip(self, length: int) -> None:
        """Read past the body, so that the connection stays in step."""
        if sum(len(chunk) for chunk in self._chunks(length)) != length:
            self.close_connection = True

    def _refuse(self, status: int, message: str) -> None:
        """Without reading the body, so the connection ends."""
        self.close_connection = True
        self._reply(status, encode_error(message))

    def _reply(self, status: int, body: bytes, *, retry_after: int | None = None) -> None:
        self.connection.settimeout(self.server.limits.idle_seconds)
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        if retry_after is not None:
            self.send_header("Retry-After", str(retry_after))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not to stderr; the first line of a request holds no secret, its headers might."""
        logger.debug(format, *args)
