"""Runs one program in the sandbox under limits, and reports how it ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from .folder import private_folder

Mode = Literal["namespaces", "landlock"]
"""Isolation of a program: by separate namespaces, or, weaker, by Landlock."""
_START_SECONDS = 60.0
"""Deadline for the child to isolate itself."""
_END_SECONDS = 10.0
_GRACE_SECONDS = 2.0
"""The child ends a program that exceeds its time; this much later the child itself is ended."""
_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from inside.main import main; main(*map(int, sys.argv[2:]))"


class SandboxError(RuntimeError):
    """The sandbox failed; the program did not run, or not to its end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program, with all the processes it starts."""

    timeout_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * 2**20
    """Address space of each process, and memory of all of them."""
    max_processes: int = 16
    """Processes and threads."""
    max_output_bytes: int = 2**20
    """Most bytes of output, and of error output; a program that writes more is ended."""
    max_file_bytes: int = 2**24
    max_folder_bytes: int = 2**26
    max_files: int = 1024
    """Files and folders in the private folder."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended."""

    exit_code: int
    """0 is success; 128 + n was ended by signal n."""
    output: str
    error_output: str
    stopped_for: Literal["", "time", "processor", "memory", "output"]
    """The exceeded limit, if there was one."""

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and not self.stopped_for


def run_program(
    source: str, stdin: str = "", limits: Limits | None = None, *, mode: Mode = "namespaces"
) -> ProgramResult:
    """Run Python `source` with `stdin` as its input. Raises `SandboxError` where the machine does not give the mode."""
    limits = limits or Limits()
    prefixes = sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix})
    job: dict[str, Any] = asdict(limits) | {
        "mode": mode,
        "source": source,
        "stdin": stdin,
        "executable": sys.executable,
        "prefixes": prefixes,
    }
    if sys.platform != "linux":
        raise SandboxError("this machine cannot run programs in the sandbox: it needs Linux")
    with ExitStack() as stack:
        if mode == "landlock":  # the other mode's folder is in the namespace's memory
            job["folder"] = stack.enter_context(private_folder(source, stdin))
        process, read = _start(json.dumps(job).encode())
        try:
            return _Conversation(process, read, limits).result()
        finally:
            _end(process)
            for descriptor in read.values():
                os.close(descriptor)


@lru_cache
def missing(mode: Mode = "namespaces") -> str | None:
    """Why this machine does not support a mode, or None; determined once, with an empty program."""
    try:
        result = run_program("print('ran')", "", Limits(timeout_seconds=_START_SECONDS, cpu_seconds=60), mode=mode)
    except SandboxError as error:
        return str(error)
    if result.output != "ran\n":
        return f"the interpreter {sys.executable} does not run inside the sandbox: {result.error_output.strip()[-300:]}"
    return None


def _start(job: bytes) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """Start the child; returns it and our ends of its pipes."""
    job_fd = os.memfd_create("job")
    ends = {name: os.pipe() for name in ("status", "output", "error_output")}
    try:
        with os.fdopen(os.dup(job_fd), "wb") as file:
            file.write(job)
        os.lseek(job_fd, 0, os.SEEK_SET)
        status = ends["status"][1]
        arguments = [str(Path(__file__).parent), str(job_fd), str(status)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=ends["output"][1],
            stderr=ends["error_output"][1],
            pass_fds=[job_fd, status],
            env={},
            start_new_session=True,
        )
    except BaseException:
        for read, _ in ends.values():
            os.close(read)
        raise
    finally:
        os.close(job_fd)
        for _, write in ends.values():
            os.close(write)
    return process, {name: read for name, (read, _) in ends.items()}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child; the kernel ends its namespaces' processes, or in the weaker mode it does so at SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):  # it ended just now
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_END_SECONDS)


class _Conversation:
    """Reads the output of child and program until both are done or the time is over."""

    def __init__(self, process: subprocess.Popen[bytes], read: dict[str, int], limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._said = {name: bytearray() for name in read}
        self._open = selectors.DefaultSelector()
        for name, descriptor in read.items():
            os.set_blocking(descriptor, False)
            self._open.register(descriptor, selectors.EVENT_READ, name)
        self._ready = False

    def result(self) -> ProgramResult:
        """How the program ended. Raises `SandboxError` where it never ran."""
        with self._open:
            too_long = self._listen()
        status: dict[str, Any] = {}
        for line in self._said["status"].splitlines():
            status |= json.loads(line)
        if "missing" in status:
            raise SandboxError(f"this machine cannot run programs in the sandbox, it lacks: {status['missing']}")
        if not self._ready:
            said = bytes(self._said["error_output"][-500:]).decode(errors="replace")
            raise SandboxError(f"the sandbox did not start (exit code {self._process.poll()}): {said}")
        longest = self._limits.max_output_bytes
        return ProgramResult(
            exit_code=status.get("exit_code", 128 + signal.SIGKILL),
            output=bytes(self._said["output"][:longest]).decode(errors="replace"),
            error_output=bytes(self._said["error_output"][:longest]).decode(errors="replace"),
            stopped_for="output" if too_long else status.get("stopped_for", "time"),
        )

    def _listen(self) -> bool:
        """Read until all pipes are closed; returns whether the program wrote too much."""
        deadline = time.monotonic() + _START_SECONDS
        while self._open.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._open.select(left):
                said = self._said[key.data]
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    self._open.unregister(key.fd)
                said += chunk
                if key.data == "status":
                    if not self._ready and b'"ready"' in said:
                        self._ready = True
                        deadline = time.monotonic() + self._limits.timeout_seconds + _GRACE_SECONDS
                elif len(said) > self._limits.max_output_bytes:
                    return True
        return False
