"""The run folder: the files of a run, and the lock that guards them.

A folder belongs to one process at a time (by a file lock, which the system releases when the process ends), from before
the first write until after the last. JSON files are replaced atomically, so readers never see a partial one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from ..errors import ConfigError, DataError, RlhfError, UserInputError
from ..util.files import open_no_follow, type_problem, write_bytes
from ..util.jsonl import write_json
from ..util.redact import PrintableFormatter, redact_mapping
from ..util.yaml12 import dump_yaml, parse_yaml

RunStatus = Literal["running", "done", "failed", "interrupted", "rolled-back-and-failed"]

DEFAULT_RUNS = Path("runs")
_LOCK_ATTEMPTS = 10
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _LogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ignores a full disk: writing important files raises, while logging would print tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _FilePath:
    """Path of a run's file, by its name in the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


class RunFolder:
    """The files of a run. Create one with `take` (locked) or `read`, and close it (or use it as a context manager).

    Args:
        path: the folder, existing or not.
    """

    lock = _FilePath(".lock")
    """Lock file with the id of the process that owns the folder."""
    config = _FilePath("config.yaml")
    manifest = _FilePath("manifest.json")
    metrics = _FilePath("metrics.jsonl")
    samples = _FilePath("samples.jsonl")
    summary = _FilePath("summary.json")
    log = _FilePath("run.log")
    checkpoints = _FilePath("checkpoints")
    model = _FilePath("model")
    adapter = _FilePath("adapter")
    control = _FilePath("control")
    """Folder of commands to a running run."""
    performance = _FilePath("performance.json")
    evaluation_before = _FilePath("evaluation-before.json")

    def __init__(self, path: Path) -> None:
        """Raises `UserInputError` for an invalid or inaccessible path."""
        try:
            (path / ".lock").lstat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserInputError(f"cannot be a run folder: {reason}", where=str(path)) from error
        self.path = path
        self._lock_file: IO[str] | None = None
        self._before: set[Path] = set()
        """Existing paths before this process took the folder: its content, the folder itself and those above it."""

    @classmethod
    def take(cls, path: Path, *, is_new: bool = True) -> RunFolder:
        """Return the folder of a run, locked until it is closed.

        Raises:
            UserInputError: another process uses it, it cannot be created, or it must be new and contains a run.
        """
        folder = cls(path)
        folder._lock()
        try:
            if is_new:
                folder.refuse_run()
        except UserInputError:
            folder.close()
            raise
        return folder

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Return the folder of a run for reading, not locked. Raises `UserInputError` if it does not contain a run."""
        folder = cls(path)
        if not folder.holds_run:
            raise UserInputError(
                "this folder does not contain a run", where=str(path), hint="pass a folder that `rlhf train` wrote"
            )
        folder.refuse_oddities()
        return folder

    def _lock(self) -> None:
        """Create the folder, and lock it until `close`."""
        self.refuse_oddities()
        for _ in range(_LOCK_ATTEMPTS):
            try:
                self._before = {path for path in (self.path, *self.path.parents) if path.exists()}
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts are private to the user
                self._before |= set(self.path.iterdir())
                lock = open(self.lock, "a+", opener=open_no_follow)  # noqa: SIM115  # until `close`
            except OSError as error:
                reason = f"cannot be written: {error.strerror or error}"
                raise UserInputError(reason, where=str(self.path), hint="choose another --output") from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                lock.close()
                raise UserInputError(
                    f"another process (pid {owner}) runs in this folder",
                    where=str(self.path),
                    hint="wait for it, stop it, or choose another --output",
                ) from error
            if _identity(self.lock) == _identity(lock.fileno()):
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
                self._lock_file = lock
                return
            lock.close()  # its owner was rejected meanwhile and removed the paths it had made
        raise UserInputError("its .lock is removed repeatedly", where=str(self.path), hint="choose another --output")

    def remove_made(self) -> None:
        """Restore the folder, and those above it, to their state before this process took it."""
        for path in set(self.path.iterdir()) - self._before:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in (self.path, *self.path.parents):
            if path not in self._before:
                with suppress(OSError):  # it is not empty
                    path.rmdir()

    def refuse_oddities(self) -> None:
        """Raise `UserInputError` if a link, pipe or device is in the place of a run's file.

        A folder may come from someone else, and a link would redirect writes.
        """
        files = (self.lock, self.config, self.manifest, self.metrics, self.samples, self.summary, self.log)
        checks = [(path, type_problem(path)) for path in (*files, self.performance, self.path / "actors.json")]
        for path, problem in (*checks, (self.control, type_problem(self.control, is_folder=True))):
            if problem is not None:
                raise UserInputError(problem, where=str(path), hint="remove it, as it is not a file of a run")

    @property
    def holds_run(self) -> bool:
        return any(file.exists() for file in (self.config, self.manifest, self.metrics, self.checkpoints))

    def refuse_run(self) -> None:
        """Raise `UserInputError` if the folder contains a run, or files that a new one would replace."""
        leftovers = [each.name for each in (self.model, self.samples) if each.exists()]
        if self.holds_run:
            hint = "continue it with --resume auto, or start a new run with another --output"
            raise UserInputError("this folder already contains a run", where=str(self.path), hint=hint)
        if leftovers:
            problem = f"this folder contains {' and '.join(leftovers)} without a run, which a new run would replace"
            raise UserInputError(problem, where=str(self.path), hint="choose another --output")

    @property
    def has_begun(self) -> bool:
        """Whether a run was started here, even if it ended before it wrote anything."""
        return self.holds_run or self.lock.exists()

    @property
    def is_in_use(self) -> bool:
        """Whether a process is using this folder."""
        if not self.lock.exists() or type_problem(self.lock) is not None:
            return False
        with self.lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved run file (JSON-like values) without secrets."""
        write_bytes(self.config, dump_yaml(redact_mapping(config)).encode())

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        write_json(self.manifest, dict(manifest))

    def add_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Add an event to `events` in the manifest: a resume, a rollback, a manual change."""
        manifest = self.read_json(self.manifest)
        event = {"kind": kind, "time": datetime.now().astimezone().isoformat(timespec="seconds"), **facts}
        self.write_manifest({**manifest, "events": [*manifest.get("events", []), event]})

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind, oldest first."""
        events = self.read_json(self.manifest).get("events", [])
        return [event for event in events if isinstance(event, dict) and event.get("kind") == kind]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        try:
            write_json(self.summary, summary)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.summary.exists():
                raise
            with self.summary.open("r+b") as file:  # in place, which does not need a new block of the disk
                file.write(json.dumps(summary, allow_nan=False).encode() + b"\n")
                file.truncate()
                os.fsync(file.fileno())

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read a JSON object of this folder, {} for a missing file. Raises `DataError` if it is not an object."""
        return self._read(path, json.loads)

    def read_config(self) -> dict[str, Any]:
        """Read `config.yaml`, {} if it is missing. Raises `DataError` if it is not a mapping."""
        return self._read(self.config, lambda text: parse_yaml(text, str(self.config)))

    def _read(self, path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
        """Read and parse a mapping, {} for a missing file. Raises `DataError`."""
        if not path.exists():
            return {}
        try:
            value = parse(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError, ConfigError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path)) from error
        if not isinstance(value, dict):
            raise DataError("is not a mapping of keys to values", where=str(path))
        return value

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Context in which all records of the logger `rlhf` and its children are also written to `run.log`."""
        logger = logging.getLogger("rlhf")
        level = logger.level
        file = open(self.log, "a", encoding="utf-8", errors="backslashreplace", opener=open_no_follow)  # noqa: SIM115
        handler = _LogHandler(file)
        handler.setFormatter(PrintableFormatter(_LOG_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)
            with suppress(OSError):  # closing retries a failed write
                file.close()

    def close(self) -> None:
        """Release the folder to other processes."""
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class FileWatch:
    """Remembers the run folder's files at construction and detects when one is removed or replaced.

    If a user removes the folder and starts another run in it, the first run must not write into it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        appended = (folder.lock, folder.metrics, folder.samples)
        self._appended = {path: seen for path in appended if (seen := _identity(path)) is not None}
        self._replaced = [path for path in (folder.config, folder.manifest) if path.exists()]  # by every change

    @property
    def has_folder(self) -> bool:
        """Whether the folder still belongs to this run."""
        lock = self._folder.lock
        return self._folder.path.is_dir() and self._appended.get(lock) in (None, _identity(lock))

    def check(self) -> None:
        """Raise `RlhfError` that names the files that were removed or replaced, if any."""
        lost = [path for path, seen in self._appended.items() if _identity(path) != seen]
        lost += [path for path in self._replaced if not path.exists()]
        if lost:
            names, hint = "the run folder", "start a new run with another --output"
            if self.has_folder:
                names, hint = ", ".join(path.name for path in lost), f"restore it, then --resume auto, or {hint}"
            message = f"{names} was removed or replaced by another process or user during the run"
            raise RlhfError(message, where=str(self._folder.path), hint=hint)


def default_path(algorithm: str, now: datetime, runs: Path = DEFAULT_RUNS) -> Path:
    """Return `runs/<algorithm>-<time>`, with a number appended if that exists."""
    name = f"{algorithm}-{now:%Y%m%d-%H%M%S}"
    path, number = runs / name, 2
    while path.exists():
        path, number = runs / f"{name}-{number}", number + 1
    return path


def find_newest(runs: Path = DEFAULT_RUNS) -> Path | None:
    """Return the run folder started last (by its `config.yaml`), None if there is none."""
    if not runs.is_dir():
        return None
    folders = [path for path in runs.iterdir() if path.is_dir() and RunFolder(path).holds_run]
    return max(folders, key=_started, default=None)


def _started(path: Path) -> tuple[int, str]:
    config = RunFolder(path).config
    return (config if config.exists() else path).stat().st_mtime_ns, path.name


def _identity(path: Path | int) -> tuple[int, int] | None:
    """Return device and inode of a file (or a descriptor), None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
