"""Entry point of each process that `launch` starts: `python -m rlhf_strategies.launched REQUEST`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from rlhf_containment.processes.parent_watch import killed_with_parent
from rlhf_core.errors import InterruptedRun, LostRankError, RlhfError, full_disk
from rlhf_core.util.jsonl import write_json
from rlhf_core.util.redact import printable, redact_text

from .loopback import keep_to_loopback


def _main(path: str) -> int:
    """Run the target of the request file as one rank, and return the exit code."""
    request = json.loads(Path(path).read_text())
    # It runs in its own session, so without this it would continue training after the launcher died.
    killed_with_parent(request["launcher"])
    keep_to_loopback()
    sys.path += [each for each in request["path"] if each not in sys.path]
    rank = int(os.environ["RANK"])
    try:
        module, _, attribute = request["target"].partition(":")
        attrgetter(attribute)(import_module(module))(*request["arguments"])
    except KeyboardInterrupt:
        return InterruptedRun.exit_code
    except BaseException as raised:
        error = full_disk(raised) or raised
        _write_error(Path(path).parent, rank, error)
        if not isinstance(error, RlhfError):
            sys.stderr.write(printable(redact_text(traceback.format_exc())))
        if isinstance(error, LostRankError):
            sys.stdout.flush()
            os._exit(error.exit_code)  # a normal exit would block on threads that wait for the lost rank
        return error.exit_code if isinstance(error, RlhfError) else 1
    return 0


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
