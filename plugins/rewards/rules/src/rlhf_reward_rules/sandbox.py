"""Running a program that nobody has read, with limits on time, processor, memory, output, processes and network.

On Linux the program gets network, process and IPC namespaces of its own where the system allows it, and runs as
`nobody` when started by root. It works in an empty folder with an empty environment, but it can still read
whatever its user may read: for programs meant to do harm, run the whole training in a container.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LAUNCHER = Path(__file__).with_name("sandbox_child.py")
_END_SECONDS = 5.0


class SandboxError(RuntimeError):
    """The sandbox itself cannot do what was asked."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program run may use."""

    timeout_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * 2**20
    max_processes: int = 16
    max_output_bytes: int = 2**20
    max_file_bytes: int = 2**24


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program run ended."""

    exit_code: int
    """0 is success; 128 + n was ended by signal n."""
    output: str
    timed_out: bool
    output_too_long: bool
    network_off: bool
    """False where the system would not cut it off the network."""

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and not self.timed_out and not self.output_too_long


def run_program(source: str, stdin: str, limits: Limits) -> ProgramResult:
    """Run Python `source` with `stdin` as its input. Its error output is dropped."""
    with (
        tempfile.TemporaryDirectory(prefix="rlhf-sandbox-") as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as given,
    ):
        os.chmod(folder, 0o777)  # the program may run as another user
        program = Path(folder) / "program.py"
        program.write_text(source, encoding="utf-8", errors="replace")
        program.chmod(0o644)
        given.write(stdin.encode("utf-8", errors="replace"))
        given.seek(0)
        status_read, status_write = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(LAUNCHER),
                    json.dumps(asdict(limits)),
                    str(program),
                    str(status_write),
                ],
                stdin=given,
                stdout=output,
                stderr=subprocess.DEVNULL,
                pass_fds=[status_write],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
        finally:
            os.close(status_write)
        try:
            timed_out = not _wait(process, limits.timeout_seconds)
            status = os.read(status_read, 4096)
        finally:
            os.close(status_read)
        if not status and not timed_out:
            raise SandboxError(f"the sandbox did not start (exit code {process.returncode})")
        output.seek(0)
        written = output.read(limits.max_output_bytes + 1)
    return ProgramResult(
        exit_code=process.returncode,
        output=written[: limits.max_output_bytes].decode("utf-8", errors="replace"),
        timed_out=timed_out,
        output_too_long=len(written) > limits.max_output_bytes,
        network_off=bool(status) and json.loads(status)["network_off"],
    )


def _wait(process: subprocess.Popen[bytes], timeout_seconds: float) -> bool:
    """Whether the program ended in time; its whole process group is gone afterwards."""
    try:
        process.wait(timeout_seconds)
        in_time = True
    except subprocess.TimeoutExpired:
        in_time = False
    with suppress(ProcessLookupError):  # nothing was left behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_SECONDS)
    return in_time
