"""Helpers for tests that start processes: patient waits for a busy machine, and cleanup of started processes.

Processes end with the test that started them, even if pytest's timeout aborts it. Each process inherits a mark in its
environment, by which it is found even after its parent has exited.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

PATIENCE_SECONDS = 600.0
"""Timeout of every wait in a test, more than five times the duration of the longest one on an idle machine."""
MARK = "RLHF_TEST_PROCESSES"
"""Environment variable of all processes that tests start. A process appends its own mark to that of its parent."""
_END_SECONDS = 60.0
_FORKS = get_context("forkserver")
PARTS_OF_RUNS = (
    "peft",
    "transformers.models.llama.modeling_llama",
    "rlhf_core.entry.train",
    "rlhf_core.training.session",
    "rlhf_strategies.torch_ddp",
    "rlhf_torch.single",
    "rlhf_passes.fast_passes",
    "rlhf_forward.scoring",
    "rlhf_hf.engine",
    "rlhf_ppo.algorithm",
)
"""Modules that a small run imports. A process that forks others imports them first, if they are installed."""
_FORKS.set_forkserver_preload(["torch", "torch.distributed.launcher.api", "rlhf_cli.commands.train", *PARTS_OF_RUNS])


def wait_until(done: Callable[[], Any], what: str, *, every_seconds: float = 0.05) -> None:
    """Poll until `done()` is true. Fails after `PATIENCE_SECONDS`, naming `what` it waited for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:g} s for {what}"
        time.sleep(every_seconds)


def marked(mark: str) -> list[psutil.Process]:
    """Return the running processes whose mark starts with this one, even if their parent has exited."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK, "").startswith(mark):
                processes.append(process)
    return processes


def command_line(process: psutil.Process) -> str:
    """Return the start of a process's command line. Empty if it has ended."""
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.NoSuchProcess:
        return ""


def kill(processes: Callable[[], list[psutil.Process]]) -> None:
    """Send SIGKILL to `processes()` until none is left."""
    deadline = time.monotonic() + _END_SECONDS
    while left := processes():
        assert time.monotonic() < deadline, f"these do not end: {left}"
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


_FSYNC = os.fsync


def fsync_of_pipes(number: int) -> None:
    """Call `os.fsync` only for pipes and other files that refuse it. Skip regular files and folders, which is slow."""
    mode = os.fstat(number).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        _FSYNC(number)


def heap_bytes() -> int:
    """Return the heap bytes in use by this process. Unlike resident memory, other processes do not affect them."""
    heap = psutil.heap_info()
    return int(heap.heap_used + heap.mmap_used)


class Forked:
    """Runs a function in a process that is forked from one with torch and transformers already imported.

    This is seconds faster than starting a process. It has its own session, and its output goes to files.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        self.mark = environment[MARK] = f"{environment.get(MARK, '')}/{uuid.uuid4().hex}"
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name) / name for name in ("out", "err")]
        places = (environment, str(cwd or os.getcwd()), [str(path) for path in self._streams])
        self._process = _FORKS.Process(target=_forked, args=(function, arguments, *places))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code. None while it runs, negative if a signal ended it."""
        return self._process.exitcode

    def assert_runs(self) -> None:
        assert self.returncode is None, f"it ended with {self.returncode}: {self.output()}"

    def output(self) -> tuple[str, str]:
        """Return the text written to stdout and stderr so far."""
        out, err = (path.read_text() if path.exists() else "" for path in self._streams)
        return out, err

    def finish(self) -> tuple[str, str]:
        """Wait for its end, and return stdout and stderr."""
        self._process.join(PATIENCE_SECONDS)
        assert self.returncode is not None, f"runs for more than {PATIENCE_SECONDS:g} s: {self.output()}"
        return self.output()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Return the process and all of its descendants that are running."""
        own = [psutil.Process(self.pid)] if self.returncode is None else []
        return own + marked(self.mark)

    def end(self) -> None:
        """Kill the process and all of its descendants."""
        self.send_signal(signal.SIGKILL)
        kill(lambda: marked(self.mark))
        self._process.join(_END_SECONDS)
        self._folder.cleanup()


def _forked(
    function: Callable[..., None],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    cwd: str,
    streams: list[str],
) -> None:
    os.setsid()
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    os.fsync = fsync_of_pipes
    tempfile.tempdir = None  # inherited from the parent
    function(*arguments)


def _command(plots: bool, quick_ray: bool, quick_ranks: bool, *arguments: str) -> None:
    from rlhf_cli.main import main

    if not plots:
        without_report()
    sys.argv = ["rlhf", *arguments]
    with _quick_workers() if quick_ray else nullcontext(), _quick_ranks() if quick_ranks else nullcontext():
        main()


def without_report() -> None:
    """Disable the report in this process, since its plots take longer than a tiny run."""
    if find_spec("rlhf_report") is not None:
        import rlhf_report

        rlhf_report.build_report = lambda run_folders, output=None: run_folders[0]


def _quick_workers() -> AbstractContextManager[None]:
    from quick_ray import quick_workers

    return quick_workers()


def _quick_ranks() -> AbstractContextManager[None]:
    from quick_ranks import quick_ranks

    return quick_ranks()


def rlhf(
    *arguments: object, plots: bool = False, quick_ray: bool = False, quick_ranks: bool = False, **options: Any
) -> Forked:
    """Start the command with these arguments.

    Args:
        arguments: Arguments of `rlhf`.
        plots: Write the report, which takes longer than a tiny run.
        quick_ray: Fork the workers of its Ray (fixture `ray_worker_source`).
        quick_ranks: Fork the processes of `--num-processes`.
        options: Options of `Forked`.
    """
    return Forked(_command, plots, quick_ray, quick_ranks, *map(str, arguments), **options)


@contextmanager
def ended(*started: Forked) -> Iterator[None]:
    """Kill the remains of these processes at the end."""
    try:
        yield
    finally:
        for each in started:
            each.end()


def run_to_end(function: Callable[..., None], *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a function in a forked process until it ends. Return exit code, stdout and stderr."""
    started = Forked(function, *arguments, **options)
    with ended(started):
        out, err = started.finish()
        assert started.returncode is not None
        return subprocess.CompletedProcess([function.__name__, *arguments], started.returncode, out, err)


def run_rlhf(
    *arguments: object, plots: bool = False, quick_ranks: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command with these arguments until it ends. Options: see `rlhf`."""
    return run_to_end(_command, plots, False, quick_ranks, *map(str, arguments), **options)


class ForkedRank(Forked):
    """The part of `Popen` that a launch uses. What the rank wrote is shown when it has ended."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(_rank, *arguments[-1:], env=environment)
        self._is_shown = False

    def poll(self) -> int | None:
        if self.returncode is not None and not self._is_shown:
            self._is_shown = True
            for stream, text in zip((sys.stdout, sys.stderr), self.output(), strict=True):
                stream.write(text)
            self._folder.cleanup()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return code


def _rank(request: str) -> None:
    """Run the rank like `python -m rlhf_strategies.launched REQUEST`."""
    from rlhf_strategies import launched

    launched.killed_with_parent = lambda launcher: None  # its parent is the process that forks
    sys.exit(launched._main(request))


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Context in which `num_processes` of `rlhf_core.train` forks its ranks.

    Unlike `quick_ranks`, they are not forked from this process, in which models may have been trained: torch's backward
    pass cannot be forked.
    """
    from rlhf_strategies import ranks

    before = ranks._start_process
    ranks._start_process = ForkedRank  # type: ignore[assignment]
    try:
        yield
    finally:
        ranks._start_process = before


def run_all(*started: Forked) -> None:
    """Wait until all of these end with status 0. If one fails or the wait times out, all are killed."""
    with ended(*started):
        wait_until(
            lambda: all(each.returncode == 0 for each in started) or any(each.returncode for each in started),
            f"the end of {len(started)} processes",
        )
        output = "\n".join(text[-3000:] for each in started for text in each.output())
        assert [each.returncode for each in started] == [0] * len(started), output


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ranks(world_size: int) -> list[dict[str, str]]:
    """Return the environment of each process of a group, as a launcher sets it."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
