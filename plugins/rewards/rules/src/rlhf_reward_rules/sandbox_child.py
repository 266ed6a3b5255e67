"""Started by `sandbox.py` as a program of its own: shuts itself in, then runs a Python file.

    python -I -S sandbox_child.py LIMITS_AS_JSON PROGRAM STATUS_FD

Standard library only. What it could shut off is written as JSON to STATUS_FD before the program starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import stat
import sys
from pathlib import Path
from typing import Any

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NOBODY = 65534


def main() -> None:
    """Namespaces, two forks (the first becomes the namespace's init, the second the program), limits, exec."""
    limits: dict[str, int] = json.loads(sys.argv[1])
    program, status_fd = sys.argv[2], int(sys.argv[3])
    status = enter_namespaces()
    status["other_user"] = os.geteuid() == 0 and world_may_run(Path(sys.executable))
    os.write(status_fd, json.dumps(status).encode())
    os.close(status_fd)
    init = os.fork()
    if init:
        os._exit(exit_code(init))
    call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    child = os.fork()
    if child:
        os._exit(exit_code(child))  # and with the init every process that the program left behind
    confine(limits, status)
    os.execv(sys.executable, [sys.executable, "-I", "-B", program])


def enter_namespaces() -> dict[str, bool]:
    """Leave the network, and see and outlive no other process. Says what the system allowed."""
    unshare = getattr(libc(), "unshare", None)
    status = {"network_off": False, "own_processes": False, "own_user_namespace": False}
    if unshare is None:  # not Linux
        return status
    wanted = CLONE_NEWNET | CLONE_NEWIPC
    for own_processes in (CLONE_NEWPID, 0):
        for own_user in (0, CLONE_NEWUSER):  # root needs no user namespace, others do
            if unshare(wanted | own_processes | own_user) == 0:
                return {
                    "network_off": True,
                    "own_processes": bool(own_processes),
                    "own_user_namespace": bool(own_user),
                }
    return status


def confine(limits: dict[str, int], status: dict[str, bool]) -> None:
    """Limits of what runs from here on; none can be raised again."""
    cpu = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["max_file_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"],) * 2)
    if status["other_user"] or status["own_user_namespace"]:
        # Elsewhere it would count all of the user's own processes, and root's are never refused.
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["max_processes"],) * 2)
    if status["other_user"]:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    call_prctl(PR_SET_NO_NEW_PRIVS, 1)
    os.setpriority(os.PRIO_PROCESS, 0, 10)


def world_may_run(executable: Path) -> bool:
    """Whether a user without rights may start the interpreter: every folder on the way is open to all."""
    real = executable.resolve()
    paths = {executable.absolute(), *executable.absolute().parents, real, *real.parents}
    return all(path.stat().st_mode & stat.S_IXOTH for path in paths)


def exit_code(pid: int) -> int:
    """Wait for a process: its exit code, or 128 + the signal that ended it."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def call_prctl(option: int, value: int) -> None:
    """prctl(2), where the system has it."""
    prctl = getattr(libc(), "prctl", None)
    if prctl is not None:
        prctl(option, value, 0, 0, 0)


def libc() -> Any:
    """The C library of this process."""
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main()
