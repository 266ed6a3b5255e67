"""Launches several cooperating processes on this machine.

Each runs `python -m rlhf_strategies.launched REQUEST`, which calls the target as one rank. A process that fails writes
its error to a file, and the launcher raises it with the rank.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf_core.distributed.interrupts import INTERRUPT_FILE, delay_signals, handle_signals, keep_interrupts
from rlhf_core.errors import UserInputError

from .loopback import HOST, served_store
from .ranks import RankGroup

_STORE_TIMEOUT = timedelta(seconds=60)


def launch(
    target: str | Callable[..., Any],
    num_processes: int,
    *,
    arguments: Sequence[Any] = (),
    timeout_seconds: float = 600.0,
    stops_by_itself: bool = False,
) -> None:
    """Call a function as each of `num_processes` ranks on this machine, and wait until all of them return.

    Each rank has `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and a loopback rendezvous address in its environment, so
    `ProcessGroup.join` and `torch.distributed.init_process_group` can be called without arguments. All ranks end
    before or with this process. Call it from the main thread, since it handles signals meanwhile.

    Args:
        target: `module:attr`, or a module-level function. The ranks import it with the `sys.path` of this process.
        num_processes: number of ranks.
        arguments: positional arguments, JSON values, the same for every rank.
        timeout_seconds: maximum time that one rank waits for another. Ranks still running this long after the first
            one has ended are killed.
        stops_by_itself: whether the target ends soon after the first Ctrl-C, which it reads from an `InterruptFlag`.
            If False, the first Ctrl-C stops the ranks immediately.

    Raises:
        RlhfError: the error of the first failed rank (in its class if that is an `RlhfError`), with the rank in
            `where`. The other ranks are stopped.
        UserInputError: the target cannot be imported by name, or `num_processes` is below 1.
        KeyboardInterrupt: the ranks were stopped by a signal.

    Example:
        launch("my_module:train_shard", 2, arguments=["data.jsonl"])
    """
    name = target if isinstance(target, str) else _name_of(target)
    if num_processes < 1:
        raise UserInputError(f"needs at least 1 process, got {num_processes}", where="launch")
    with _scratch() as scratch:
        request, interrupted = scratch / "request.json", scratch / "interrupted"
        request.write_text(
            json.dumps(
                {
                    "target": name,
                    "arguments": list(arguments),
                    "path": list(map(str, sys.path)),
                    "launcher": os.getpid(),
                }
            )
        )
        store = served_store(HOST, timeout=_STORE_TIMEOUT)
        environment = {
            # The processes share the machine's cores, unless the user sets this variable.
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun sets it
            **os.environ,
            "WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is a client of the store too
            INTERRUPT_FILE: str(interrupted),
        }
        with (
            _interrupts_as_file(interrupted, graceful=stops_by_itself),
            RankGroup(request, timeout_seconds) as ranks,
        ):
            ranks.start(num_processes, environment)
            ranks.wait()
        ranks.raise_failure(interrupted=interrupted.exists())


def stop_requested() -> bool:
    """Whether the launcher of this rank received a signal to stop. False in a process that `launch` did not start.

    Example:
        >>> stop_requested()
        False
    """
    shared = os.environ.get(INTERRUPT_FILE)
    return shared is not None and os.path.exists(shared)


def _name_of(function: Callable[..., Any]) -> str:
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name or function.__module__ == "__main__":
        raise UserInputError(
            f"other processes cannot import {name}",
            where="launch",
            hint="define the function at the top level of a module, and call launch from another one",
        )
    return name


@contextmanager
def _scratch() -> Iterator[Path]:
    """Temporary folder for files exchanged with the ranks. It is removed even if a signal arrives."""
    scratch = Path(tempfile.mkdtemp(prefix="rlhf-launch-"))
    try:
        yield scratch
    finally:
        with delay_signals():
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _interrupts_as_file(path: Path, *, graceful: bool) -> Iterator[None]:
    """With `graceful`, the first Ctrl-C creates the file `path`, which signals all ranks to stop. The next raises.

    SIGUSR1 creates it, too, and never raises then.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if graceful and (number == signal.SIGUSR1 or not path.exists()):
            path.touch()
        else:
            raise KeyboardInterrupt

    with handle_signals(handle), keep_interrupts():
        yield
