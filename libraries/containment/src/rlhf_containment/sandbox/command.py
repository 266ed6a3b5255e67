"""Runs one command in the sandbox, in a private working folder, with at most one port that leads out of it."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Lock

from .inside import files as folder_files
from .inside.files import FolderError, FolderFile
from .run import Limits, ProgramResult, SandboxError, StartedSandbox, make_job

_LISTEN_SECONDS = 60.0
"""Deadline for the child to send the listening socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxedCommand:
    """A program and its arguments, with its files, variables and limits in the sandbox."""

    command: Sequence[str]
    """Without a slash, the program is searched in the variable PATH."""
    files: Mapping[str, FolderFile] = field(default_factory=dict)
    """Files of its working folder by path."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Its environment variables. Home and temporary folder are set by the sandbox."""
    readable: Sequence[str] = ()
    """Absolute paths that it may read, in addition to the system's and the interpreter's."""
    limits: Limits = field(default_factory=Limits)
    """Memory counts as resident, as the sum over its processes."""
    port: int | None = None
    """Port of 127.0.0.1 on which `on_listening`'s socket accepts its connections. None: nothing listens there."""


class CommandRun:
    """One run of a command. It needs the mode `namespaces`.

    Example:
        run = CommandRun(SandboxedCommand(command=["sh", "-c", "echo hello > greeting"]))
        result = run.run()
        assert result.succeeded and result.files["greeting"].data == b"hello\\n"
    """

    def __init__(self, command: SandboxedCommand) -> None:
        """Start nothing yet.

        Args:
            command: The command and its limits.
        """
        self._command = command
        self._lock = Lock()
        self._started: StartedSandbox | None = None
        self._is_stopped = False

    def run(self, on_listening: Callable[[socket.socket], None] | None = None) -> ProgramResult:
        """Run the command until it ends, exceeds a limit, or is stopped. Blocks this thread.

        The kernel ends the command with the thread that started it.

        Args:
            on_listening: Receives the socket that listens on the command's port, before the command starts. The
                receiver accepts its connections and closes it.

        Returns:
            Output, exit status and working folder. A stopped command has the exit code of a killed one.

        Raises:
            SandboxError: the machine does not support the sandbox, the program cannot be started inside, or its files
                cannot be created.
        """
        command = self._command
        try:
            for path in command.files:
                folder_files.check_path(path)
        except FolderError as error:
            raise SandboxError(f"the working folder {error}") from None
        with ExitStack() as stack:
            given = stack.enter_context(tempfile.TemporaryFile())
            kept = stack.enter_context(tempfile.TemporaryFile())
            folder_files.send(command.files, given)
            given.seek(0)
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            job = make_job(command.limits, "namespaces") | {
                "command": list(command.command),
                "variables": dict(command.variables),
                "readable": sorted(command.readable),
                "port": command.port,
                "files": given.fileno(),
                "result": kept.fileno(),
                "channel": theirs.fileno(),
            }
            started = StartedSandbox(job, [given.fileno(), kept.fileno(), theirs.fileno()])
            stack.callback(self._end, started)
            theirs.close()
            with self._lock:
                self._started = started
                if self._is_stopped:
                    started.stop()
            if command.port is not None and (listener := _receive_listener(ours)) is not None:
                if on_listening is None:
                    listener.close()
                else:
                    on_listening(listener)
            try:
                result = started.result(command.limits)
            except SandboxError:
                if not self._is_stopped:
                    raise
                return ProgramResult(exit_code=128 + signal.SIGKILL, output="", error_output="", stopped_for="")
            if result.stopped_for:
                return result
            kept.seek(0)
            return replace(result, files=folder_files.receive(kept))

    def stop(self) -> None:
        """Kill the command and all of its processes, from any thread. `run` then returns soon."""
        with self._lock:
            self._is_stopped = True
            if self._started is not None:
                self._started.stop()

    def _end(self, started: StartedSandbox) -> None:
        with self._lock:
            self._started = None
        started.end()


def _receive_listener(channel: socket.socket) -> socket.socket | None:
    """Return the socket that the child sends, or None if it has failed, which its status then explains."""
    channel.settimeout(_LISTEN_SECONDS)
    try:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    except TimeoutError:
        raise SandboxError(f"the sandbox did not open its port within {_LISTEN_SECONDS:g} s") from None
    if not message:
        return None
    return socket.socket(fileno=descriptors[0])


def save_folder(files: Mapping[str, FolderFile], folder: str | os.PathLike[str]) -> None:
    """Create the files of a result in an empty folder.

    Args:
        files: Files by path.
        folder: An existing folder.
    """
    folder_files.save(files, os.fspath(folder))
