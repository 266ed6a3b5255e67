"""Several processes on this machine that work together, started and watched by torch elastic.

Each process runs `python -m rlhf_strategies.launched REQUEST`, which calls the target as one rank.
What goes wrong in one of them is written down by it and raised here, with its rank.
"""

from __future__ import annotations

import json
import logging
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

from rlhf_core.distributed.interrupts import INTERRUPT_FILE, held_signals, interrupts_kept, stop_signals
from rlhf_core.errors import RlhfError, UserInputError

from .loopback import loopback_store
from .rank_watch import watched_ranks

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

    A rank has `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and a loopback address to meet at in its environment, so
    `ProcessGroup.join` and `torch.distributed.init_process_group` need no arguments. No rank outlives this process.

    Args:
        target: `module:attr`, or a function of a module. The ranks import it, with the `sys.path` of this process.
        num_processes: number of ranks.
        arguments: positional arguments, which are JSON values; every rank gets the same.
        timeout_seconds: the longest that one rank waits for another. After the first rank has ended, the others are
            killed when this has passed.
        stops_by_itself: whether the target ends soon after the first Ctrl-C, which it reads from an `InterruptFlag`.
            Otherwise that stops the ranks at once. Call from the main thread: signals are handled meanwhile.

    Raises:
        RlhfError: what the first failed rank raised (of its class if it is an `RlhfError`), with the rank in `where`.
            The other ranks are stopped.
        UserInputError: the target has no name to import it by, or there is no process to start.
        KeyboardInterrupt: the ranks were stopped by a signal.

    Example:
        launch("my_module:train_shard", 2, arguments=["data.jsonl"])
    """
    name = target if isinstance(target, str) else _name_of(target)
    if num_processes < 1:
        raise UserInputError(f"needs at least 1 process, got {num_processes}", where="launch")
    with _scratch() as scratch:
        store = loopback_store(timeout=_STORE_TIMEOUT)
        request = scratch / "request.json"
        request.write_text(
            json.dumps(
                {
                    "target": name,
                    "arguments": list(arguments),
                    "path": list(map(str, sys.path)),
                    "launcher": os.getpid(),
                    "store_port": store.port,
                }
            )
        )
        _run_ranks(request, num_processes, timeout_seconds, asks_first=stops_by_itself)


def _run_ranks(request: Path, num_processes: int, timeout_seconds: float, *, asks_first: bool) -> None:
    """Start the ranks that read the file `request`, and wait for them."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    scratch = request.parent
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"rlhf-{os.getpid()}",
        rdzv_backend="c10d",
        # A file, as a store of elastic's own would listen on all interfaces.
        rdzv_endpoint=str(scratch / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "elastic")),
        **_own_signals(LaunchConfig),
    )
    interrupted = scratch / "interrupted"
    with (
        watched_ranks(request, timeout_seconds) as watch,
        _interrupts_as_file(interrupted, watch.kill_all, asks_first=asks_first),
        _environment(num_processes),
        _quiet_elastic(),
    ):
        try:
            elastic_launch(config, sys.executable)("-m", "rlhf_strategies.launched", str(request))
        except SignalException as error:
            raise KeyboardInterrupt from error
        except ChildFailedError as error:
            known = _first_error(scratch)
            if known is None and interrupted.exists():  # the signal met a process that was still starting
                raise KeyboardInterrupt from None
            rank, failure = error.get_first_failure()
            # What the others wrote then is only that they lost it.
            is_cause = failure.exitcode < 0 and rank not in watch.killed
            raise (None if is_cause else known) or _killed(rank, failure) from None


def _name_of(function: Callable[..., Any]) -> str:
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name or function.__module__ == "__main__":
        raise UserInputError(
            f"other processes cannot import {name}",
            where="launch",
            hint="define the function at the top level of a module, and call launch from another one",
        )
    return name


def _own_signals(config: type[Any]) -> dict[str, Any]:
    """Elastic would end the processes at the first Ctrl-C, before they have written a checkpoint.

    A torch that has no such option (before 2.9) does so.
    """
    return {"signals_to_handle": "SIGQUIT"} if "signals_to_handle" in config.__dataclass_fields__ else {}


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Replaces elastic's messages about a failed process by one."""
    elastic = logging.getLogger("torch.distributed.elastic")
    before = elastic.level
    elastic.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        elastic.setLevel(before)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for what is told between the processes of a run; no signal keeps it from being removed."""
    scratch = Path(tempfile.mkdtemp(prefix="rlhf-launch-"))
    try:
        yield scratch
    finally:
        with held_signals():
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _interrupts_as_file(path: Path, kill_all: Callable[[], None], *, asks_first: bool) -> Iterator[None]:
    """With `asks_first`, the first Ctrl-C asks all processes, through a file, to stop. The next one stops them at once.

    While elastic ends them for that, one more kills them: raised there, it would leave them behind.
    """
    heard: list[int] = [] if asks_first else [0]

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) == 1:
            path.touch()
        elif len(heard) == 2:
            raise KeyboardInterrupt
        else:
            kill_all()

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    os.environ[INTERRUPT_FILE] = str(path)
    try:
        with interrupts_kept():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.environ.pop(INTERRUPT_FILE, None)


@contextmanager
def _environment(num_processes: int) -> Iterator[None]:
    """The processes share the machine's cores, and meet at the store made here, unless the user says otherwise."""
    ours = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    added = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _first_error(scratch: Path) -> RlhfError | None:
    """The earliest error that a process wrote down; the others' usually only say that it was gone."""
    found = [json.loads(path.read_text()) for path in scratch.glob("error-*.json")]
    if not found:
        return None
    first = min(found, key=lambda each: float(each["time"]))
    kinds: dict[str, type[RlhfError]] = {kind.__name__: kind for kind in _all_kinds(RlhfError)}
    kind = kinds.get(first["kind"], RlhfError)
    where = f"rank {first['rank']}" + (f", {first['where']}" if first["where"] else "")
    return kind(first["message"], where=where, hint=first["hint"])


def _all_kinds(kind: type[RlhfError]) -> Iterator[type[RlhfError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _all_kinds(each)


def _killed(rank: int, failure: Any) -> RlhfError:
    code = failure.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return RlhfError(
        f"the training process of rank {rank} (pid {failure.pid}) {how}; the others were stopped",
        where=f"rank {rank}",
        hint="SIGKILL is often the system running out of memory; a run continues with --resume auto",
    )
