"""A process that answers one request at a time within a deadline, and the loop that answers inside that process."""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from itertools import takewhile
from multiprocessing.connection import Connection
from types import MappingProxyType

from ..lock_watch import STACKS_SIGNAL
from .child import START_SECONDS, ChildProcess
from .parent_watch import killed_with_parent

_POLL_SECONDS = 0.05
_MAX_ANSWER_BYTES = 64 << 20
_STACK_SECONDS = 0.5
_MAX_STACK_BYTES = 1 << 16
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_MAX_FRAMES = 4


class ProcessFault(Exception):
    """A process failed to answer and must be ended. The text completes a sentence whose subject is the process."""


class ProcessTimeout(ProcessFault):
    """The process did not answer in time."""


class ProcessLost(ProcessFault):
    """The process exited or exceeded its memory limit."""


class BadAnswer(ProcessFault):
    """The process sent something that is not an answer."""


class RequestProcess(ChildProcess):
    """A process `python -m MODULE SOCKET PARENT` that answers requests through `serve_requests`.

    Only one thread may send requests at a time. End the process after any `ProcessFault`.

    Example:
        process = RequestProcess("my_package.worker", memory_limit_bytes=2**30)
        try:
            process.start(b"configuration")
            answer = process.ask(b"request", timeout_seconds=5.0)
        finally:
            process.end()
    """

    def __init__(
        self,
        module: str,
        *,
        memory_limit_bytes: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the process. Raises `OSError` or `MemoryError` if the system cannot start it.

        Args:
            module: dotted name of the module to run, which must call `serve_requests`.
            memory_limit_bytes: maximum resident memory while it answers. None is half of the available memory.
            environment: variables to set in addition to those of this process.
        """
        super().__init__(module, memory_limit_bytes=memory_limit_bytes, environment=environment)
        self._source = module.replace(".", "/") + ".py"
        self._pipe = Connection(self.connection.detach())

    def start(self, request: bytes) -> bytes:
        """Send the first request, with a longer deadline (`START_SECONDS`) and without a memory limit."""
        return self._request(request, START_SECONDS, limits_memory=False)

    def ask(self, request: bytes, timeout_seconds: float) -> bytes:
        """Send a request and return the answer. Raises `ProcessFault` if it fails, is late or uses too much memory."""
        return self._request(request, timeout_seconds, limits_memory=True)

    def _request(self, request: bytes, timeout_seconds: float, *, limits_memory: bool) -> bytes:
        deadline = time.monotonic() + timeout_seconds
        self._limit_transfers(timeout_seconds)
        try:
            self._pipe.send_bytes(request)
        except BlockingIOError:
            raise ProcessTimeout(f"did not take its input within {timeout_seconds:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            raise ProcessLost(self.death()) from None
        try:
            while not self._pipe.poll(_POLL_SECONDS):
                if limits_memory and (excess := self.excess()):
                    raise ProcessLost(excess)
                if time.monotonic() > deadline:
                    raise ProcessTimeout(f"gave no answer within {timeout_seconds:g} s{self._hanging_line()}")
            return self._pipe.recv_bytes(_MAX_ANSWER_BYTES)
        except BlockingIOError:
            raise ProcessTimeout(f"stopped in the middle of an answer for {timeout_seconds:g} s") from None
        except (EOFError, ConnectionResetError):
            raise ProcessLost(self.death()) from None
        except OSError as error:
            raise BadAnswer(f"wrote something that is not an answer: {error}") from None

    def _hanging_line(self) -> str:
        """Position of its main thread, as the end of a sentence. Empty if unknown. No requests are possible after it.

        The process writes its stack into the socket, which no longer carries whole messages then.
        """
        with suppress(OSError):
            os.kill(self.pid, STACKS_SIGNAL)
            if self._pipe.poll(_STACK_SECONDS):
                time.sleep(_POLL_SECONDS)  # the stack is written in pieces
                stack = _FRAME.findall(os.read(self._pipe.fileno(), _MAX_STACK_BYTES).decode(errors="replace"))
                frames = takewhile(lambda frame: not frame[0].endswith(self._source), stack)
                lines = [f"{file}:{line} in {name}" for file, line, name in frames][:_MAX_FRAMES]
                return ", at " + ", called from ".join(lines) if lines else ""
        return ""

    def _limit_transfers(self, seconds: float) -> None:
        """Set a timeout for each read and write, since a hanging process may stop in the middle of a message."""
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as same:
            limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # a timeval, where 0 means no limit
            limit = limit if any(limit) else struct.pack("@ll", 0, 1)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, limit)

    def end(self) -> None:
        self._pipe.close()
        super().end()


def serve_requests(descriptor: int, parent: int, answer: Callable[[bytes], bytes]) -> None:
    """Answer requests from a socket until it closes. The kernel kills the process when its parent exits.

    Called in the process of a `RequestProcess`. On `STACKS_SIGNAL` the process writes its stack to the socket as text,
    after which the other side ends it.

    Args:
        descriptor: file descriptor of the socket, the first argument of the process.
        parent: process id of the parent, the second argument of the process.
        answer: returns the answer to a request. Its exceptions end the process.

    Example:
        if __name__ == "__main__":
            serve_requests(int(sys.argv[1]), int(sys.argv[2]), lambda request: request.upper())
    """
    killed_with_parent(parent)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=False)  # in C: another call may hold the GIL
    with closing(Connection(descriptor)) as connection, suppress(EOFError, BrokenPipeError):  # the run is over
        while True:
            connection.send_bytes(answer(connection.recv_bytes()))
