"""Starts the processes of a launch, waits for them, and ends those that are lost or keep running after a failure."""

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
"""Time for a process to exit on its own after the others have reported it lost, or after SIGTERM."""
_AFTER_SUCCESS_SECONDS = 60.0
"""Extra time beyond the deadline for rank 0 to finish writing after all ranks are done."""
_AFTER_FAILURE_SECONDS = 30.0
"""Maximum time that a process continues after another has failed."""
_CLEAN_EXIT_CODES = (0, InterruptedRun.exit_code)
"""Exit codes of a process that finished, or stopped when requested."""


class RankGroup:
    """Ranks that run `rlhf_strategies.launched` with one request file. All have exited when the context ends."""

    def __init__(self, request: Path, timeout_seconds: float) -> None:
        """`timeout_seconds`: maximum time that one process waits for another."""
        self._request = request
        self._timeout_seconds = timeout_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        """Indexed by rank."""
        self._kill_times: dict[int, float] = {}
        """Rank -> monotonic time at which to kill it."""
        self._signaled: set[int] = set()
        """Ranks that this object has sent a signal."""

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *error: object) -> None:
        """Send SIGTERM to processes that still run, and kill them a second later."""
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
        """Start the processes with `environment` and their ranks."""
        command = (sys.executable, "-m", "rlhf_strategies.launched", str(self._request))
        with delay_signals():
            for rank in range(num_processes):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(_start_process(command, {**environment, **ranks}))

    def wait(self) -> None:
        """Wait until all have ended."""
        while self._running():
            self.poll()
            time.sleep(_POLL_SECONDS)

    def poll(self) -> None:
        """Check which ranks have ended or are lost, and end those whose time is up."""
        running, now = self._running(), time.monotonic()
        failed = any(each.returncode not in (None, *_CLEAN_EXIT_CODES) for each in self._processes)
        for rank in self._lost_ranks():
            self._end_by(rank, now + _GRACE_SECONDS)
        for rank in running:
            if failed:
                if rank not in self._signaled:
                    self._signal(rank, signal.SIGTERM)
                self._end_by(rank, now + min(self._timeout_seconds, _AFTER_FAILURE_SECONDS) + _GRACE_SECONDS)
            elif len(running) < len(self._processes):
                self._end_by(rank, now + self._timeout_seconds + _AFTER_SUCCESS_SECONDS)
            if now >= self._kill_times.get(rank, now + 1):
                self._signal(rank, signal.SIGKILL)

    def raise_failure(self, *, interrupted: bool) -> None:
        """Raise the error of the first rank that failed, or its exit status. Call it after all ranks have ended.

        `interrupted`: whether they were signaled to stop. A rank that was still starting then leaves no error file.
        """
        failed = [rank for rank, process in enumerate(self._processes) if process.returncode != 0]
        if not failed:
            return
        killed = [rank for rank in failed if self._processes[rank].returncode < 0 and rank not in self._signaled]
        error = _first_error(self._errors())
        if error is None and interrupted:
            raise KeyboardInterrupt
        # After one was killed, the errors of the others only report that they lost it.
        if killed or error is None:
            first = (killed or failed)[0]
            raise _exit_error(first, self._processes[first])
        raise error

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    def _lost_ranks(self) -> set[int]:
        """Ranks that others reported as lost."""
        return {rank for error in self._errors() for rank in error["lost_ranks"]}

    def _errors(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self._request.parent.glob("error-*.json")]

    def _end_by(self, rank: int, when: float) -> None:
        self._kill_times[rank] = min(when, self._kill_times.get(rank, when))

    def _signal(self, rank: int, number: signal.Signals) -> None:
        self._signaled.add(rank)
        self._processes[rank].send_signal(number)


def _start_process(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that a terminal's Ctrl-C reaches only the launcher."""
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _first_error(records: Sequence[Mapping[str, Any]]) -> RlhfError | None:
    """The earliest error that a process recorded. Later ones usually only report that it exited."""
    if not records:
        return None
    first = min(records, key=lambda each: float(each["time"]))
    kinds: dict[str, type[RlhfError]] = {kind.__name__: kind for kind in _all_kinds(RlhfError)}
    where = f"rank {first['rank']}" + (f", {first['where']}" if first["where"] else "")
    return kinds.get(first["kind"], RlhfError)(first["message"], where=where, hint=first["hint"])


def _exit_error(rank: int, process: subprocess.Popen[bytes]) -> RlhfError:
    """The error for a process that ended without recording one."""
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return RlhfError(
        f"the training process of rank {rank} (pid {process.pid}) {how}, so the others were stopped",
        where=f"rank {rank}",
        hint="SIGKILL often means that the system ran out of memory. Continue the run with --resume auto",
    )


def _all_kinds(kind: type[RlhfError]) -> Iterator[type[RlhfError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _all_kinds(each)
