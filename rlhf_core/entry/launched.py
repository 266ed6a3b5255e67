"""One of the training processes that `launch` starts: `python -m rlhf_core.entry.launched REQUEST`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from ..errors import InterruptedRun, RlhfError
from ..util.jsonl import write_json
from .train import train

_PR_SET_PDEATHSIG = 1
"""`prctl`'s request for a signal at the parent's death (linux/prctl.h)."""


def _main(path: str) -> int:
    """One of the processes."""
    request = json.loads(Path(path).read_text())
    _end_with(request["launcher"])
    rank = int(os.environ["RANK"])
    try:
        train(
            request["run"],
            output=request["output"],
            resume=request["resume"],
            hooks=request["hooks"] if rank == 0 else (),
            origin=None if request["origin"] is None else Path(request["origin"]),
        )
    except KeyboardInterrupt:
        return InterruptedRun.exit_code
    except BaseException as error:
        _write_error(Path(path).parent, rank, error)
        if not isinstance(error, RlhfError):
            traceback.print_exc()
        return error.exit_code if isinstance(error, RlhfError) else 1
    return 0


def _end_with(launcher: int) -> None:
    """Die when the launcher does, even by SIGKILL: torch elastic starts its processes in sessions of their own, and one
    that nobody waits for would go on training and hold the run folder. Linux only; elsewhere it goes on to its end.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _write_error(scratch: Path, rank: int, error: BaseException) -> None:
    known = error if isinstance(error, RlhfError) else None
    record = {
        "time": time.time(),
        "rank": rank,
        "kind": type(error).__name__,
        "message": f"{type(error).__name__}: {error}" if known is None else known.message,
        "where": None if known is None else known.where,
        "hint": "the traceback is above" if known is None else known.hint,
    }
    write_json(scratch / f"error-{rank}.json", record)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
