"""Runs one program in the sandbox under limits and returns its output and exit status."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from .folder import private_folder
from .inside.files import FolderFile

Mode = Literal["namespaces", "landlock"]
"""Isolation of a program, by separate namespaces or, weaker, by Landlock."""
_START_SECONDS = 60.0
"""Deadline for the child to isolate itself."""
_END_SECONDS = 10.0
_GRACE_SECONDS = 2.0
"""Grace period after the time limit. The child kills a late program, and is killed itself if it has not done so."""
_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from inside.main import main; main(*map(int, sys.argv[2:]))"


class SandboxError(RuntimeError):
    """The sandbox failed, and the program did not run or did not finish."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program and all the processes that it starts."""

    timeout_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * 2**20
    """Maximum address space of each process, and maximum memory of all of them together."""
    max_processes: int = 16
    """Maximum number of processes and threads."""
    max_output_bytes: int = 2**20
    """Maximum size of output and of error output, each. A program that writes more is killed."""
    max_file_bytes: int = 2**24
    max_folder_bytes: int = 2**26
    max_files: int = 1024
    """Maximum number of files and folders in the private folder."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Output and exit status of a program."""

    exit_code: int
    """0 for success, 128 + n if ended by signal n."""
    output: str
    error_output: str
    stopped_for: Literal["", "time", "processor", "memory", "output", "child", "folder"]
    """The exceeded limit, empty if none was. Only for a command: `child` (a process that it started has not ended) and
    `folder` (its working folder is too large or cannot be read)."""
    problem: str = ""
    """Details of `child` and `folder`."""
    files: Mapping[str, FolderFile] = field(default_factory=dict)
    """Regular files in a command's working folder, by path. Empty if a limit was exceeded."""

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and not self.stopped_for


def run_program(
    source: str, stdin: str = "", limits: Limits | None = None, *, mode: Mode = "namespaces"
) -> ProgramResult:
    """Run untrusted Python source in a sandbox.

    Args:
        source: the program.
        stdin: its standard input.
        limits: limits on time, memory, processes, files and output. None uses the defaults of `Limits`.
        mode: isolation of the program.

    Returns:
        Output and exit status, also of a program that failed or exceeded a limit.

    Raises:
        SandboxError: if the machine does not support the mode, or the sandbox itself failed.

    Example:
        result = run_program("print(int(input()) + 1)", stdin="41", limits=Limits(timeout_seconds=2.0))
        assert result.succeeded and result.output == "42\\n"
    """
    limits = limits or Limits()
    job = make_job(limits, mode) | {"source": source, "stdin": stdin}
    with ExitStack() as stack:
        if mode == "landlock":  # the other mode's folder is in the namespace's memory
            job["folder"] = stack.enter_context(private_folder(source, stdin))
        started = StartedSandbox(job)
        try:
            return started.result(limits)
        finally:
            started.end()


@lru_cache
def missing(mode: Mode = "namespaces") -> str | None:
    """Return the reason why this machine does not support a mode, or None. A trial program runs at the first call.

    Args:
        mode: isolation of programs.
    """
    try:
        result = run_program("print('ran')", "", Limits(timeout_seconds=_START_SECONDS, cpu_seconds=60), mode=mode)
    except SandboxError as error:
        return str(error)
    if result.output != "ran\n":
        return f"the interpreter {sys.executable} does not run inside the sandbox: {result.error_output.strip()[-300:]}"
    return None


def make_job(limits: Limits, mode: Mode) -> dict[str, Any]:
    """Return the part of a job that every program has. Raises `SandboxError` on systems other than Linux."""
    if sys.platform != "linux":
        raise SandboxError("this machine cannot run programs in the sandbox: it needs Linux")
    prefixes = sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix})
    return asdict(limits) | {"mode": mode, "executable": sys.executable, "prefixes": prefixes}


class StartedSandbox:
    """The sandbox's child process with the pipes of its status and output.

    The kernel ends the child with the thread that started it.
    """

    def __init__(self, job: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Start the child.

        Args:
            job: JSON values that `inside.main` reads.
            descriptors: File descriptors that the child inherits.
        """
        job_fd = os.memfd_create("job")
        self._status, status = os.pipe()
        try:
            with os.fdopen(os.dup(job_fd), "wb") as file:
                file.write(json.dumps(job).encode())
            os.lseek(job_fd, 0, os.SEEK_SET)
            arguments = [str(Path(__file__).parent), str(job_fd), str(status)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[job_fd, status, *descriptors],
                env={},
                start_new_session=True,
            )
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(job_fd)
            os.close(status)

    def result(self, limits: Limits) -> ProgramResult:
        """Read until child and program finish, write too much or are late. Raises `SandboxError` if none ran."""
        assert self._process.stdout is not None and self._process.stderr is not None
        pipes = {
            "status": self._status,
            "output": self._process.stdout.fileno(),
            "error_output": self._process.stderr.fileno(),
        }
        return _result(self._process, pipes, limits)

    def stop(self) -> None:
        """Kill the child, and with it the processes of its namespaces, from any thread."""
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """End the child and close the pipes. In the weaker mode the child ends its descendants on SIGTERM."""
        process = self._process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):  # it has just exited
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(_END_SECONDS)
        os.close(self._status)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()


def _result(process: subprocess.Popen[bytes], read: dict[str, int], limits: Limits) -> ProgramResult:
    """Read until child and program finish, write too much or are late. Raises `SandboxError` if none ran.

    Args:
        process: the child.
        read: file descriptors of `status`, `output` and `error_output`.
        limits: limits of the program.
    """
    received = {name: bytearray() for name in read}
    is_ready = too_long = False
    deadline = time.monotonic() + _START_SECONDS
    with selectors.DefaultSelector() as pipes:
        for name, descriptor in read.items():
            os.set_blocking(descriptor, False)
            pipes.register(descriptor, selectors.EVENT_READ, name)
        while pipes.get_map() and not too_long and (left := deadline - time.monotonic()) > 0:
            for key, _ in pipes.select(left):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    pipes.unregister(key.fd)
                received[key.data] += chunk
                if key.data != "status":
                    too_long |= len(received[key.data]) > limits.max_output_bytes
                elif not is_ready and b'"ready"' in received["status"]:
                    is_ready = True
                    deadline = time.monotonic() + limits.timeout_seconds + _GRACE_SECONDS
        timed_out = bool(pipes.get_map()) and not too_long
    status: dict[str, Any] = {}
    for line in received["status"].splitlines():
        status |= json.loads(line)
    if "missing" in status:
        raise SandboxError(f"this machine cannot run programs in the sandbox, it lacks: {status['missing']}")
    if "not_started" in status:
        raise SandboxError(f"the sandbox cannot start {status['not_started']}")
    if not is_ready:
        message = bytes(received["error_output"][-500:]).decode(errors="replace")
        raise SandboxError(f"the sandbox did not start (exit code {process.poll()}): {message}")
    output, error_output = (
        bytes(received[name][: limits.max_output_bytes]).decode(errors="replace") for name in ("output", "error_output")
    )
    if "failed" in status:
        error_output += f"\n[the process that watches the program failed: {status['failed']}]\n"
    return ProgramResult(
        exit_code=status.get("exit_code", 128 + signal.SIGKILL),
        output=output,
        error_output=error_output,
        stopped_for="output" if too_long else status.get("stopped_for", "time" if timed_out else ""),
        problem=status.get("problem", ""),
    )
