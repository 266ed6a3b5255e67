"""Several training processes on this machine (`--num-processes N`), started and watched by torch elastic.

Each process runs `python -m rlhf_core.entry.launched REQUEST`, which runs as one rank.
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

from ..config.resolve import ResolvedRun
from ..distributed.interrupts import INTERRUPT_FILE, interrupts_kept, stop_signals
from ..distributed.loopback import loopback_store
from ..errors import RlhfError
from ..util.held_signals import held_signals
from .rank_watch import watched_ranks

_STORE_TIMEOUT = timedelta(seconds=60)
_TIMEOUT_SECONDS = 600.0
"""How long processes wait for one another under a strategy that has no option for it."""


def run_in_processes(
    resolved: ResolvedRun,
    output: Path,
    checkpoint: Path | None,
    num_processes: int,
    hooks: Sequence[str],
) -> None:
    """Run in `num_processes` processes of this machine, and wait for all of them.

    The run folder `output` belongs to this process all the while; rank 0 writes into it, and ends with this process.

    `hooks`: `module:attr` of hook factories, called in rank 0. Raises what the first failed process raised, naming
    its rank; torch elastic stops the others.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with _scratch() as scratch:
        store = loopback_store(timeout=_STORE_TIMEOUT)
        request = scratch / "request.json"
        request.write_text(
            json.dumps(
                {
                    "run": resolved.to_mapping(),
                    "output": str(output),
                    "checkpoint": None if checkpoint is None else str(checkpoint),
                    "hooks": list(hooks),
                    "launcher": os.getpid(),
                    "store_port": store.port,
                }
            )
        )
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
        timeout_seconds = float(getattr(resolved.strategy.config, "timeout_seconds", _TIMEOUT_SECONDS))
        with (
            watched_ranks(request, timeout_seconds) as watch,
            _interrupts_as_file(interrupted, watch.kill_all),
            _environment(num_processes),
            _quiet_elastic(),
        ):
            try:
                elastic_launch(config, sys.executable)("-m", "rlhf_core.entry.launched", str(request))
            except SignalException as error:
                raise KeyboardInterrupt from error
            except ChildFailedError as error:
                known = _first_error(scratch)
                if known is None and interrupted.exists():  # the signal met a process that was still starting
                    raise KeyboardInterrupt from None
                raise known or _killed(error) from None


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
def _interrupts_as_file(path: Path, kill_all: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C asks all processes, through a file, to stop after the episode; the second stops at once.

    While elastic ends them for the second, a third kills them: raised there, it would leave them behind.
    """
    heard: list[int] = []

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


def _killed(error: Any) -> RlhfError:
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return RlhfError(
        f"the training process of rank {rank} (pid {failure.pid}) {how}; the others were stopped",
        where=f"rank {rank}",
        hint="SIGKILL is often the system running out of memory; continue with --resume auto",
    )
