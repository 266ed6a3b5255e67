"""Helpers for tests that start processes: waits with room for a busy machine, and an end for whatever was started.

What a test starts ends with the test, also where pytest's limit of time cuts it. Each process carries a mark in its
environment and hands it to those below it, by which they are found although the one that started them is gone.
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
"""How long a test waits for anything: more than five times what the longest wait takes on an idle machine."""
MARK = "RLHF_TEST_PROCESSES"
"""Environment variable of all that tests start; a process inherits the mark of who started it, with its own behind."""
_END_SECONDS = 60.0
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.launcher.api",
        "transformers.models.llama.modeling_llama",
        "peft",
        "rlhf_core.training.session",
        "rlhf_core.entry.train",
        "rlhf_cli.commands.train",
        "rlhf_colossalai.ddp",
    ]
)


def wait_until(done: Callable[[], Any], what: str, *, every_seconds: float = 0.05) -> None:
    """Ask again and again whether it is done. Fails after `PATIENCE_SECONDS`, naming `what` it waited for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:g} s for {what}"
        time.sleep(every_seconds)


def marked(mark: str) -> list[psutil.Process]:
    """Processes that run and have this mark or one behind it, whatever became of who started them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK, "").startswith(mark):
                found.append(process)
    return found


def command_line(process: psutil.Process) -> str:
    """Its beginning; empty where it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.NoSuchProcess:
        return ""


def kill(processes: Callable[[], list[psutil.Process]]) -> None:
    """kill -9 of these, asked for again until there are none."""
    deadline = time.monotonic() + _END_SECONDS
    while left := processes():
        assert time.monotonic() < deadline, f"these do not end: {left}"
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


_FSYNC = os.fsync


def fsync_of_pipes(number: int) -> None:
    """`os.fsync` where it is refused; of a file or a folder nothing, however long the disk would take."""
    mode = os.fstat(number).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        _FSYNC(number)


def heap_bytes() -> int:
    """Heap bytes in use by this process; unlike resident pages, nothing else on the machine changes them."""
    heap = psutil.heap_info()
    return int(heap.heap_used + heap.mmap_used)


class Forked:
    """A function in a process of its own, forked from one that has imported torch and transformers already.

    It is as real as one that was started anew, seconds sooner; in a session of its own, its output in files.
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
        """None while it runs; negative where a signal ended it."""
        return self._process.exitcode

    def assert_runs(self) -> None:
        assert self.returncode is None, f"it ended with {self.returncode}: {self.output()}"

    def output(self) -> tuple[str, str]:
        """The text it has written to stdout and stderr."""
        out, err = (path.read_text() if path.exists() else "" for path in self._streams)
        return out, err

    def finish(self) -> tuple[str, str]:
        """Wait for its end; stdout and stderr."""
        self._process.join(PATIENCE_SECONDS)
        assert self.returncode is not None, f"runs for more than {PATIENCE_SECONDS:g} s: {self.output()}"
        return self.output()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def processes(self) -> list[psutil.Process]:
        """It and all that it started, as far as they run."""
        own = [psutil.Process(self.pid)] if self.returncode is None else []
        return own + marked(self.mark)

    def end(self) -> None:
        """kill -9 of all of it."""
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
    tempfile.tempdir = None  # what the process that it was forked from has found
    function(*arguments)


def _command(plots: bool, quick_ray: bool, quick_ranks: bool, *arguments: str) -> None:
    from rlhf_cli.main import main

    if not plots:
        without_report()
    sys.argv = ["rlhf", *arguments]
    with _quick_workers() if quick_ray else nullcontext(), _quick_ranks() if quick_ranks else nullcontext():
        main()


def without_report() -> None:
    """From here on runs of this process write no report, whose plots take longer than a tiny run."""
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
    """The command with these arguments, started; plots take longer than a tiny run.

    `quick_ray`: the Ray that it starts has its workers from the fixture `ray_worker_source`. `quick_ranks`: the
    processes of `--num-processes` are forked, too.
    """
    return Forked(_command, plots, quick_ray, quick_ranks, *map(str, arguments), **options)


@contextmanager
def ended(*started: Forked) -> Iterator[None]:
    """Whatever is left of these at the end is killed."""
    try:
        yield
    finally:
        for each in started:
            each.end()


def run_to_end(function: Callable[..., None], *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A function in a forked process, to its end: exit code, stdout and stderr."""
    started = Forked(function, *arguments, **options)
    with ended(started):
        out, err = started.finish()
        assert started.returncode is not None
        return subprocess.CompletedProcess([function.__name__, *arguments], started.returncode, out, err)


def run_rlhf(*arguments: object, plots: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command with these arguments, to its end."""
    return run_to_end(_command, plots, False, False, *map(str, arguments), **options)


def run_all(*started: Forked) -> None:
    """Wait for all of these, which must end well; at the first that does not, or in vain, all are killed."""
    with ended(*started):
        wait_until(
            lambda: all(each.returncode == 0 for each in started) or any(each.returncode for each in started),
            f"the end of {len(started)} processes",
        )
        said = "\n".join(text[-3000:] for each in started for text in each.output())
        assert [each.returncode for each in started] == [0] * len(started), said


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ranks(world_size: int) -> list[dict[str, str]]:
    """The environment of each process of a group, as a launcher sets it."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
