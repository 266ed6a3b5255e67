"""The sandbox's child process: `main(JOB_FD, STATUS_FD)` isolates itself and runs the job's program.

There are three processes: this one stays outside, the second is the first process of the new namespaces and watches,
and the third becomes the program. In the weaker mode the first two are one process. The status is two lines of JSON:
`ready` or `missing` before the program runs, then its exit code and the exceeded limit.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from contextlib import suppress
from typing import Any, NoReturn

from . import files, kernel, landlock, network, syscall_filter, system, view, watch

NOBODY = 65534
_OPEN_FILES = 256
_OPEN_FILES_OF_A_COMMAND = 1024
_LEAVE_SECONDS = 1.0
"""Time for the other processes of a command to exit after its first one."""
_MAX_OPEN_FILES_LANDLOCK, _MIN_OPEN_FILES_LANDLOCK = 64, 16
"""Bounds of open files in the weaker mode. Each may be a socket, whose buffer counts as memory of the process."""


def main(job_fd: int, status_fd: int) -> NoReturn:
    """Run the job and exit. The result is written to `status_fd`, not returned as the exit code."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(job_fd, "rb") as file:
        job: dict[str, Any] = json.load(file)
    os.set_inheritable(status_fd, False)
    with suppress(ValueError, OSError):  # a hard limit of 0 cannot be raised
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # 0 would not prevent a pipe in `core_pattern`
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        if job["mode"] == "namespaces":
            _in_namespaces(job, status_fd)
        else:
            _under_landlock(job, status_fd)
    except (kernel.Unavailable, OSError) as error:
        _report(status_fd, {"missing": str(error)})
    os._exit(0)


def _in_namespaces(job: dict[str, Any], status_fd: int) -> None:
    mapped_read, mapped_write = os.pipe()
    alive_read, alive_write = os.pipe()
    user, group, as_root = os.geteuid(), os.getegid(), _may_become_nobody()
    child = kernel.clone(kernel.NAMESPACES)
    if child:
        for descriptor in (mapped_read, alive_read, 0, 1, 2):
            os.close(descriptor)
        _map_users(child, user, group, as_root)
        os.write(mapped_write, b"m")
        os.waitpid(child, 0)
        os._exit(0)
    os.close(mapped_write)
    os.close(alive_write)
    try:
        if not os.read(mapped_read, 1):
            os._exit(0)  # the first process failed and has reported why
        is_command = "command" in job
        if is_command:
            job["socket_bytes"] = network.open_loopback(job["port"], job["channel"])
        view.enter(job, NOBODY)
        kernel.drop_rights(NOBODY if as_root else None)
        if is_command:
            _make_folder(job, status_fd)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # so that the program cannot trace it
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user resets the earlier setting
        if select.select([alive_read], [], [], 0)[0]:
            os._exit(0)  # its parent died before the line above
        syscall_filter.install(opens_sockets=is_command)
    except (kernel.Unavailable, OSError) as error:
        _report(status_fd, {"missing": str(error)})
        os._exit(0)
    if is_command:
        _run(job, status_fd, "", os.devnull, view.WORK)
    _run(job, status_fd, view.PROGRAM, view.INPUT, view.PRIVATE)


def _make_folder(job: dict[str, Any], status_fd: int) -> None:
    """Create the files of a command's working folder, or report why that fails and exit."""
    try:
        with os.fdopen(job["files"], "rb") as file:
            files.save(files.receive(file), view.WORK)
    except (files.FolderError, OSError) as error:
        _report(status_fd, {"not_started": f"{job['command'][0]!r}: its working folder: {error}"})
        os._exit(0)


def _may_become_nobody() -> bool:
    """Whether this is real root, rather than a user mapped to root in a rootless container."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="ascii") as file:
        users = [tuple(map(int, line.split())) for line in file]
    return any(first <= NOBODY < first + count for first, _, count in users) or any(
        first == 0 == outside for first, outside, _ in users
    )


def _map_users(child: int, user: int, group: int, as_root: bool) -> None:
    """Map users of the child's namespace to users outside: root and `nobody`, or the starting user."""
    both = "0 0 1\n65534 65534 1\n"
    files = {"uid_map": both, "gid_map": both}
    if not as_root:
        files = {"setgroups": "deny", "uid_map": f"{NOBODY} {user} 1\n", "gid_map": f"{NOBODY} {group} 1\n"}
    for name, text in files.items():
        try:
            with open(f"/proc/{child}/{name}", "w", encoding="ascii") as file:
                file.write(text)
        except OSError as error:
            raise kernel.Unavailable(f"mapping users of a namespace ({name}: {error.strerror})") from error


def _under_landlock(job: dict[str, Any], status_fd: int) -> None:
    landlock.check()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _end_all)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)  # without namespaces, the kernel does not end descendants
    _run(job, status_fd, job["folder"] + "/program.py", job["folder"] + "/input", job["folder"] + "/work")


def _end_all(number: int, frame: object) -> None:
    watch.end_descendants()
    os._exit(0)


def _run(job: dict[str, Any], status_fd: int, program: str, stdin: str, folder: str) -> NoReturn:
    """Start the program, wait for it, report its exit status and end all of its descendants."""
    in_namespaces = job["mode"] == "namespaces"
    socket_bytes = 0
    if in_namespaces:
        watch.check_num_sockets()
        socket_bytes = max(watch.bytes_of_a_socket(), job.get("socket_bytes", 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # with a Python handler, the program could signal this process
    _report(status_fd, {"ready": True})
    status: dict[str, Any]
    try:
        try:
            code, stopped_for = watch.wait_for(
                _fork(job, status_fd, program, stdin, folder),
                wall_seconds=job["timeout_seconds"],
                cpu_seconds=job["cpu_seconds"],
                memory_bytes=job["memory_bytes"] if in_namespaces else None,
                socket_bytes=socket_bytes,
            )
        finally:
            if not in_namespaces:
                watch.end_descendants()
        status = {"exit_code": code, "stopped_for": stopped_for}
        if "command" in job and not stopped_for:
            status |= _finish(job, folder, socket_bytes)
    except Exception as error:  # the program may have caused it, so the machine is not at fault
        status = {"exit_code": 128 + signal.SIGKILL, "stopped_for": "", "failed": repr(error)}
    _report(status_fd, status)
    os._exit(0)


def _finish(job: dict[str, Any], folder: str, socket_bytes: int) -> dict[str, Any]:
    """End the processes that a command left, write its working folder to the result file, and return what went wrong.

    The command runs in its own process namespace.
    """
    left, is_too_large = watch.remaining(_LEAVE_SECONDS, memory_bytes=job["memory_bytes"], socket_bytes=socket_bytes)
    watch.end_all()
    if is_too_large:
        return {"stopped_for": "memory"}
    if left:
        return {"stopped_for": "child", "problem": ", ".join(left)}
    try:
        with os.fdopen(job["result"], "wb") as file:
            files.send(files.collect(folder, job["max_folder_bytes"]), file)
    except (files.FolderError, OSError) as error:
        return {"stopped_for": "folder", "problem": str(error)}
    return {}


def _fork(job: dict[str, Any], status_fd: int, program: str, stdin: str, folder: str) -> int:
    """Fork the process that executes the program, and return its id. Raises `OSError` if the fork fails.

    If the program cannot be executed, that process reports the reason to `status_fd` and exits with code 127.
    """
    child = os.fork()
    if child == 0:
        try:
            _exec_program(job, status_fd, program, stdin, folder)
        except Exception as error:
            if "command" in job:
                _report(status_fd, {"not_started": f"{job['command'][0]!r}: {error}"})
            else:
                _report(status_fd, {"missing": f"the interpreter inside ({error})"})
        os._exit(127)
    return child


def _exec_program(job: dict[str, Any], status_fd: int, program: str, stdin: str, folder: str) -> NoReturn:
    """Set the last restrictions and limits in the third process and replace it with the program."""
    os.setsid()
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    kernel.close_from(3, keep=[status_fd])
    os.chdir(folder)
    os.umask(0o077)
    watcher_counts = True  # whether the process limit of the program's user includes the watching process
    if job["mode"] == "landlock":
        watcher_counts = os.geteuid() != 0
        kernel.drop_rights(NOBODY if os.geteuid() == 0 else None)
        readable = [*system.FOLDERS, *system.FILES, "/dev/zero", *system.interpreter_paths(job["prefixes"]), program]
        landlock.restrict(readable, system.DEVICES, folder)
        syscall_filter.install(signals_to=os.getpid())
    _limit(job, job["max_processes"] + watcher_counts, *_memory_and_files(job))
    os.setpriority(os.PRIO_PROCESS, 0, max(10, os.getpriority(os.PRIO_PROCESS, 0)))  # raising priority is refused
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    if "command" in job:
        environment |= {"HOME": view.HOME, "TMPDIR": view.TEMPORARY, **job["variables"]}
        os.execvpe(job["command"][0], job["command"], environment)
    os.execve(job["executable"], [job["executable"], "-I", "-B", program], environment)


def _memory_and_files(job: dict[str, Any]) -> tuple[int, int]:
    """Maximum address space in bytes and number of open files of each process.

    The address space of a command is not limited, since Node reserves much more than it uses. Sockets are not counted
    in the weaker mode, so full buffers of all open files are subtracted from the address space.
    """
    memory = int(job["memory_bytes"])
    if "command" in job:
        return resource.RLIM_INFINITY, _OPEN_FILES_OF_A_COMMAND
    if job["mode"] == "namespaces":
        return memory, _OPEN_FILES
    socket_bytes = watch.bytes_of_a_socket()
    files = max(_MIN_OPEN_FILES_LANDLOCK, min(_MAX_OPEN_FILES_LANDLOCK, memory // 4 // socket_bytes))
    return max(memory - files * socket_bytes, memory // 2), files


def _limit(job: dict[str, Any], num_processes: int, memory_bytes: int, open_files: int) -> None:
    """Set the limits of this process and its descendants. They cannot be raised again."""
    cpu = int(job["cpu_seconds"])
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, job["max_file_bytes"], job["max_file_bytes"]),
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_NPROC, num_processes, num_processes),
        (resource.RLIMIT_NOFILE, open_files, open_files),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_SIGPENDING, _OPEN_FILES, _OPEN_FILES),
    ):
        maximum = resource.getrlimit(limit)[1]
        if maximum != resource.RLIM_INFINITY:
            soft, hard = min(soft, maximum), min(hard, maximum)
        resource.setrlimit(limit, (soft, hard))


def _report(status_fd: int, status: dict[str, Any]) -> None:
    os.write(status_fd, json.dumps(status).encode() + b"\n")
