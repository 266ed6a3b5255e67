"""A process that answers one request at a time, each within a deadline; and the loop that answers in the process."""

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
    """A process did not answer; the text is the end of a sentence about it. It must be ended."""


class ProcessTimeout(ProcessFault):
    """It did not answer in time."""


class ProcessLost(ProcessFault):
    """It ended, or took too much memory."""


class BadAnswer(ProcessFault):
    """It sent something that is not an answer."""


class RequestProcess(ChildProcess):
    """`python -m MODULE`, whose `main` calls `serve_requests`. One thread at a time may ask."""

    def __init__(
        self,
        module: str,
        *,
        memory_limit_bytes: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(module, memory_limit_bytes=memory_limit_bytes, environment=environment)
        self._source = module.replace(".", "/") + ".py"
        self._pipe = Connection(self.connection.detach())

    def start(self, request: bytes) -> bytes:
        """`ask` for the first time: with the deadline of a start, and without a limit on memory."""
        return self._ask(request, START_SECONDS, limits_memory=False)

    def ask(self, request: bytes, timeout_seconds: float) -> bytes:
        """The answer to a request. Raises `ProcessFault`."""
        return self._ask(request, timeout_seconds, limits_memory=True)

    def _ask(self, request: bytes, timeout_seconds: float, *, limits_memory: bool) -> bytes:
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
        """Where its main thread is, as the end of a sentence; empty if unknown. Nothing can be asked afterwards."""
        with suppress(OSError):
            os.kill(self.pid, STACKS_SIGNAL)
            if self._pipe.poll(_STACK_SECONDS):
                time.sleep(_POLL_SECONDS)  # it is written in pieces
                found = _FRAME.findall(os.read(self._pipe.fileno(), _MAX_STACK_BYTES).decode(errors="replace"))
                frames = takewhile(lambda frame: not frame[0].endswith(self._source), found)
                lines = [f"{file}:{line} in {name}" for file, line, name in frames][:_MAX_FRAMES]
                return ", at " + ", called from ".join(lines) if lines else ""
        return ""

    def _limit_transfers(self, seconds: float) -> None:
        """Bound each read and write: a process that hangs does not finish a message in either direction."""
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as same:
            limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # a timeval; 0 would mean no limit
            limit = limit if any(limit) else struct.pack("@ll", 0, 1)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, limit)

    def end(self) -> None:
        self._pipe.close()
        super().end()


def serve_requests(descriptor: int, parent: int, answer: Callable[[bytes], bytes]) -> None:
    """Answer on the socket `descriptor` until it closes or the parent process is gone. Runs in the process.

    At `STACKS_SIGNAL` the process writes its stack to the socket, as text; the other side then ends it.
    """
    killed_with_parent(parent)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=False)  # in C: Python's lock may be held
    with closing(Connection(descriptor)) as connection, suppress(EOFError, BrokenPipeError):  # the run is over
        while True:
            connection.send_bytes(answer(connection.recv_bytes()))
