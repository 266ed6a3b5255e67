"""The processes of a launch: started, waited for, and ended when the others have lost them or somebody failed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.distributed.interrupts import delay_signals
from rlhf_core.errors import InterruptedRun, RlhfError

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 1.0
"""For a process that was only late to end by itself, once the others have given it up or it was asked to end."""
_AFTER_SUCCESS_SECONDS = 60.0
"""How much longer than the deadline rank 0 may take over what it writes when all ranks are done."""
_AFTER_FAILURE_SECONDS = 30.0
"""The longest that a process goes on after another has failed."""
_IN_ORDER = (0, InterruptedRun.exit_code)
"""Exit codes of a process that came to its end, or ended when it was asked to."""


class Ranks:
    """Processes that run `rlhf_strategies.launched` with one request file. None is left when the context ends."""

    def __init__(self, request: Path, timeout_seconds: float) -> None:
        """`timeout_seconds`: the longest that one of them waits for another."""
        self._request = request
        self._timeout_seconds = timeout_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        """By rank."""
        self._due: dict[int, float] = {}
        """Rank -> when it is killed."""
        self._ended_here: set[int] = set()
        """Ranks that were asked to end or killed here, not by something else."""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        """Ask those that still run to end, and kill them a moment later."""
        with delay_signals():
            for rank in self._running():
                self._signal(rank, signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
            for rank in self._running():
                try:
                    self._processes[rank].wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self._signal(rank, signal.SIGKILL)
                    self._processes[rank].wait()

    def start(self, num_processes: int, environment: Mapping[str, str]) -> None:
        """Start them, with their ranks beside `environment`."""
        command = (sys.executable, "-m", "rlhf_strategies.launched", str(self._request))
        with delay_signals():
            for rank in range(num_processes):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(_started(command, {**environment, **own}))

    def wait(self) -> None:
        """Wait until all have ended."""
        while self._running():
            self.look()
            time.sleep(_POLL_SECONDS)

    def look(self) -> None:
        """Find out who has ended and who was given up; end those who had time enough since."""
        running, now = self._running(), time.monotonic()
        failed = any(each.returncode not in (None, *_IN_ORDER) for each in self._processes)
        for rank in self._given_up():
            self._end_by(rank, now + _GRACE_SECONDS)
        for rank in running:
            if failed:
                if rank not in self._ended_here:
                    self._signal(rank, signal.SIGTERM)
                self._end_by(rank, now + min(self._timeout_seconds, _AFTER_FAILURE_SECONDS) + _GRACE_SECONDS)
            elif len(running) < len(self._processes):
                self._end_by(rank, now + self._timeout_seconds + _AFTER_SUCCESS_SECONDS)
            if now >= self._due.get(rank, now + 1):
                self._signal(rank, signal.SIGKILL)

    def raise_failure(self, *, interrupted: bool) -> None:
        """Once all have ended: raise what the first one that failed wrote down, or how it ended.

        `interrupted`: whether they were asked to stop. One that was still starting then says nothing.
        """
        failed = [rank for rank, process in enumerate(self._processes) if process.returncode != 0]
        if not failed:
            return
        killed = [rank for rank in failed if self._processes[rank].returncode < 0 and rank not in self._ended_here]
        error = _first_of(self._errors())
        if error is None and interrupted:
            raise KeyboardInterrupt
        # What the others wrote after one was killed is only that they lost it.
        if killed or error is None:
            first = (killed or failed)[0]
            raise _ended(first, self._processes[first])
        raise error

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    def _given_up(self) -> set[int]:
        """Ranks that others could not reach, as their errors say."""
        return {rank for error in self._errors() for rank in error["lost_ranks"]}

    def _errors(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self._request.parent.glob("error-*.json")]

    def _end_by(self, rank: int, when: float) -> None:
        self._due[rank] = min(when, self._due.get(rank, when))

    def _signal(self, rank: int, number: signal.Signals) -> None:
        self._ended_here.add(rank)
        self._processes[rank].send_signal(number)


def _started(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own: a terminal's Ctrl-C is the launcher's to hear."""
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _first_of(written: Sequence[Mapping[str, Any]]) -> RlhfError | None:
    """The earliest error that a process wrote down; the others' usually only say that it was gone."""
    if not written:
        return None
    first = min(written, key=lambda each: float(each["time"]))
    kinds: dict[str, type[RlhfError]] = {kind.__name__: kind for kind in _all_kinds(RlhfError)}
    where = f"rank {first['rank']}" + (f", {first['where']}" if first["where"] else "")
    return kinds.get(first["kind"], RlhfError)(first["message"], where=where, hint=first["hint"])


def _ended(rank: int, process: subprocess.Popen[bytes]) -> RlhfError:
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return RlhfError(
        f"the training process of rank {rank} (pid {process.pid}) {how}; the others were stopped",
        where=f"rank {rank}",
        hint="SIGKILL is often the system running out of memory; a run continues with --resume auto",
    )


def _all_kinds(kind: type[RlhfError]) -> Iterator[type[RlhfError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _all_kinds(each)
