"""A reward in processes of its own: one that hangs, leaks or crashes is ended and started again.

What crosses between the processes goes over a private socket pair, never through a file. Samples go there pickled;
what comes back is JSON, since a reward that is fed hostile answers may write anything.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import Any

from ..distributed.child_process import START_SECONDS, ChildProcess, default_memory_limit_bytes
from ..distributed.lock_watch import STACKS_SIGNAL
from ..types import Rollout
from .threads import DeadlinePassed
from .values import BadScore, RewardFault
from .worker import BadAnswer, read_answer

_POLL_SECONDS = 0.05
_MAX_ANSWER_BYTES = 64 << 20
_STACK_SECONDS = 0.5
_MAX_STACK_BYTES = 1 << 16
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_MAX_FRAMES = 4


class ProcessLost(RewardFault):
    """The process of a call ended, or was ended since it took too much memory."""


class IsolatedReward:
    """Worker processes that score batches, one for each call at a time; safe between threads.

    `build` is a picklable callable without arguments that makes the reward inside the worker.
    `memory_limit_bytes` bounds a worker's resident memory where /proc tells it (Linux): beyond it during a
    call, the call fails; beyond it after one, the process is replaced before the next. None is half of what
    there is.
    """

    def __init__(self, build: Callable[[], Any], *, memory_limit_bytes: int | None) -> None:
        try:
            self._recipe = pickle.dumps(build)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardFault(f"cannot be run in a process of its own: {error}") from error
        self._memory_limit_bytes = memory_limit_bytes or default_memory_limit_bytes()
        self._lock = threading.Lock()
        self._alive: set[_Worker] = set()
        self._free: list[_Worker] = []
        """Those that score nothing now; the last one is taken first, which keeps few alive."""
        self._closed = False

    def score(self, rollouts: Sequence[Rollout], timeout_seconds: float) -> list[float | BadScore]:
        """Scores of one batch. Raises `RewardFault`: it raised, hung, died, or took too much memory."""
        worker = self._take()
        keep = False
        try:
            kind, answer = worker.ask(rollouts, timeout_seconds, self._memory_limit_bytes)
            with self._lock:
                keep = not self._closed and worker.resident_bytes() <= self._memory_limit_bytes
                if keep:
                    self._free.append(worker)
        finally:
            if not keep:
                self._end(worker)
        if kind == "failed":
            raise RewardFault(str(answer))
        return answer  # type: ignore[no-any-return]

    def prepare(self) -> None:
        """Have a process ready for the next call. Raises `RewardFault` or `OSError` if it cannot be made."""
        worker = self._take()
        with self._lock:
            if not self._closed:
                self._free.append(worker)
                return
        self._end(worker)

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RewardFault("is closed: the run is ending")
            if self._free:
                return self._free.pop()
            worker = _Worker()
            self._alive.add(worker)
        try:
            worker.build(self._recipe)
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.end()

    def close(self) -> None:
        """End every process. Calls that still run fail; later ones too."""
        with self._lock:
            self._closed = True
            alive, free = list(self._alive), self._free
            self._free = []
        for worker in alive:
            worker.kill()  # a call in flight sees its connection close, and ends the worker itself
        for worker in free:
            self._end(worker)


class _Worker(ChildProcess):
    """One process and the connection to it."""

    def __init__(self) -> None:
        super().__init__("rlhf_core.rewards.worker")
        self._connection = Connection(self.connection.detach())

    def build(self, recipe: bytes) -> None:
        """Have the process make its reward. Raises `RewardFault` where it cannot."""
        self._connection.send_bytes(recipe)
        kind, reason = self._receive(0, time.monotonic() + START_SECONDS, START_SECONDS, None)
        if kind != "ready":
            raise RewardFault(str(reason))

    def ask(self, rollouts: Sequence[Rollout], timeout_seconds: float, memory_limit_bytes: int) -> tuple[str, Any]:
        """Send one batch and wait for its answer."""
        deadline = time.monotonic() + timeout_seconds
        self._limit_transfers(timeout_seconds)
        try:
            self._connection.send(list(rollouts))
        except BlockingIOError:
            raise DeadlinePassed(f"did not take the samples within {timeout_seconds:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            raise ProcessLost(self.death()) from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardFault(f"cannot be sent these samples: {error}") from error
        return self._receive(len(rollouts), deadline, timeout_seconds, memory_limit_bytes)

    def _receive(
        self, count: int, deadline: float, timeout_seconds: float, memory_limit_bytes: int | None
    ) -> tuple[str, Any]:
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if memory_limit_bytes is not None and (used := self.resident_bytes()) > memory_limit_bytes:
                    raise ProcessLost(f"took {used:,} bytes of memory, more than its limit of {memory_limit_bytes:,}")
                if time.monotonic() > deadline:
                    raise DeadlinePassed(f"gave no answer within {timeout_seconds:g} s{self._hanging_line()}")
            return read_answer(self._connection.recv_bytes(_MAX_ANSWER_BYTES), count)
        except BlockingIOError:
            raise DeadlinePassed(f"stopped in the middle of an answer for {timeout_seconds:g} s") from None
        except (EOFError, ConnectionResetError):
            raise ProcessLost(self.death()) from None
        except (OSError, BadAnswer) as error:
            raise RewardFault(f"wrote what is no answer: {error}") from None

    def _hanging_line(self) -> str:
        """Where its main thread is, as the end of a sentence; empty if it does not say. Nothing can be asked after."""
        with suppress(OSError):
            os.kill(self.pid, STACKS_SIGNAL)
            if self._connection.poll(_STACK_SECONDS):
                time.sleep(_POLL_SECONDS)  # it is written in pieces
                found = _FRAME.findall(os.read(self._connection.fileno(), _MAX_STACK_BYTES).decode(errors="replace"))
                frames = takewhile(lambda frame: not frame[0].endswith("rlhf_core/rewards/worker.py"), found)
                lines = [f"{file}:{line} in {name}" for file, line, name in frames][:_MAX_FRAMES]
                return ", at " + ", called from ".join(lines) if lines else ""
        return ""

    def _limit_transfers(self, seconds: float) -> None:
        """Bound each read and write: a process that hangs neither takes nor gives the rest of a message."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # a timeval; 0 would be for ever
            limit = limit if any(limit) else struct.pack("@ll", 0, 1)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, limit)

    def end(self) -> None:
        self._connection.close()
        super().end()
