"""One of the training processes that `launch` starts: `python -m rlhf_core.entry.launched REQUEST`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..distributed.loopback import HOST
from ..distributed.parent_watch import killed_with_parent
from ..distributed.process_group import LostRankError
from ..errors import InterruptedRun, RlhfError, full_disk
from ..hookspecs import hookimpl
from ..runfolder.folder import RunFolder
from ..util.jsonl import write_json
from ..util.printable import printable
from ..util.redact import redact_text
from .train import prepare, run_rank


def _main(path: str) -> int:
    """One of the processes."""
    request = json.loads(Path(path).read_text())
    # torch elastic starts its processes in sessions of their own: one that nobody waits for would go on training.
    killed_with_parent(request["launcher"])
    # The launcher's own store, in place of one of elastic's.
    os.environ |= {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(request["store_port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    rank = int(os.environ["RANK"])
    try:
        _run(request, Path(path).parent, rank)
    except KeyboardInterrupt:
        return InterruptedRun.exit_code
    except BaseException as raised:
        error = full_disk(raised) or raised
        _write_error(Path(path).parent, rank, error)
        if not isinstance(error, RlhfError):
            sys.stderr.write(printable(redact_text(traceback.format_exc())))
        if isinstance(error, InterruptedRun):
            _tell_done(Path(path).parent, rank)
        if isinstance(error, LostRankError):
            sys.stdout.flush()
            os._exit(error.exit_code)  # an interpreter's end takes its time with what waits for the lost
        return error.exit_code if isinstance(error, RlhfError) else 1
    _tell_done(Path(path).parent, rank)
    return 0


def _run(request: Mapping[str, Any], scratch: Path, rank: int) -> None:
    """Run as the rank this is, in the run folder that the launcher owns."""
    prepared = prepare(request["run"], hooks=request["hooks"] if rank == 0 else ())
    prepared.relay.register(_LostRanks(scratch), name="lost-ranks")
    folder = RunFolder(Path(request["output"]))
    checkpoint = None if request["checkpoint"] is None else Path(request["checkpoint"])
    with folder.logging() if rank == 0 else nullcontext():
        run_rank(prepared, folder, checkpoint)


class _LostRanks:
    """Tells the launcher of ranks that rank 0 has lost, so that it ends them while the report is being written."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    @hookimpl(tryfirst=True)
    def rlhf_run_end(self, error: BaseException | None) -> None:
        if isinstance(error, LostRankError):
            _write_error(self._scratch, 0, error)


def _tell_done(scratch: Path, rank: int) -> None:
    """Let the launcher know that this process ended in order, at the run's end or when it was asked to."""
    (scratch / f"done-{rank}").touch()


def _write_error(scratch: Path, rank: int, error: BaseException) -> None:
    known = error if isinstance(error, RlhfError) else None
    record = {
        "time": time.time(),
        "rank": rank,
        "kind": type(error).__name__,
        "message": f"{type(error).__name__}: {error}" if known is None else known.message,
        "where": None if known is None else known.where,
        "hint": "the traceback is above" if known is None else known.hint,
        "lost_ranks": error.ranks if isinstance(error, LostRankError) else (),
    }
    write_json(scratch / f"error-{rank}.json", record)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
