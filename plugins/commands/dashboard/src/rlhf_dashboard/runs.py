"""Finds the run folders in a folder and reads their small files.

Requests name a run by an id that is a hash of its path. Only ids of folders that were found are answered, so requests
cannot name paths. Links are not followed.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.errors import RlhfError
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import redact_mapping, redact_text
from rlhf_pages import known_line, known_values

from .tail import read_new_lines

_DEPTH = 3
_MAX_RUNS = 500
_LOG_BYTES = 256 * 2**10
_LINE_BYTES = 64 * 2**10
_RECORD = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* ([A-Z]+) \S+: ", re.MULTILINE)
_EVENT_LEVELS = {"WARNING", "ERROR", "CRITICAL"}
_TRACEBACK = "Traceback (most recent call last):"
_MAX_EVENTS = 200
_SKIPPED = {"checkpoints", "model", "adapter", "tensorboard", "control"}
"""Folders of a run that are not searched for runs."""


class Runs:
    """The runs at or below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._runs: dict[str, tuple[str, RunFolder]] = {}
        self._configs: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def find(self, run: str) -> RunFolder | None:
        """Return the folder of an id, None if the id is unknown."""
        if run not in self._runs:
            self._scan()
        return self._runs[run][1] if run in self._runs else None

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per run, the most recently changed first. `parent` is the id of the run that contains it."""
        self._scan()
        ids = {folder.path: run for run, (_, folder) in self._runs.items()}
        rows = [
            {**self._row(run, name, folder), "parent": next((ids[up] for up in folder.path.parents if up in ids), None)}
            for run, (name, folder) in self._runs.items()
        ]
        return sorted(rows, key=lambda row: row["changed"], reverse=True)

    def details(self, folder: RunFolder) -> dict[str, Any]:
        """Return the data of one run's page except its curves and samples."""
        manifest = _read(folder, folder.manifest)
        listed = manifest.pop("events", None)
        events = [known_values(each) for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        return {
            "summary": known_values(_read(folder, folder.summary)),
            "config": self._config(folder),
            "manifest": known_values(manifest),
            "events": [*events, *log_events(folder.log)][-_MAX_EVENTS:],
            "actors": known_values(_read(folder, folder.path / "ray.json")),
        }

    def _scan(self) -> None:
        folders = _folders(self._root, _DEPTH)
        runs = {}
        for path in folders:
            name = path.relative_to(self._root).as_posix() if path != self._root else path.resolve().name
            try:
                runs[hashlib.sha256(os.fsencode(path)).hexdigest()[:16]] = (name, RunFolder.read(path))
            except (RlhfError, OSError):
                continue  # not a run folder, or one with a link or a device in place of a file
            if len(runs) == _MAX_RUNS:
                break
        self._runs = runs

    def _row(self, run: str, name: str, folder: RunFolder) -> dict[str, Any]:
        summary = known_values(_read(folder, folder.summary))
        last = read_new_lines(folder.metrics, None, known_line, newest_bytes=_LINE_BYTES).lines
        config = self._config(folder)
        return {
            "id": run,
            "name": name,
            "status": _status(summary),
            "algorithm": _name(config.get("algorithm")),
            "model": _name(config.get("model"), "path"),
            "eval_before": summary.get("eval_before"),
            "eval_after": summary.get("eval_after"),
            "wall_s": None if summary.get("status") == "running" else summary.get("wall_s"),
            "last": dict(last[-1]) if last else {},
            "changed": max(_changed(folder.metrics), _changed(folder.summary), _changed(folder.config)),
        }

    def _config(self, folder: RunFolder) -> dict[str, Any]:
        """Return the run file, cached until the file changes, since YAML is slow to read."""
        try:
            status = folder.config.stat()
            key = (status.st_mtime_ns, status.st_size)
            if self._configs.get(folder.config, (None,))[0] != key:
                self._configs[folder.config] = (key, known_values(redact_mapping(folder.read_config())))
            return self._configs[folder.config][1]
        except (RlhfError, OSError):
            return {}


def log_events(path: Path) -> list[dict[str, Any]]:
    """Return the warnings and errors at the end of a log, including those of guards and the one that ended the run."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(opened, "rb") as file:
        file.seek(max(0, os.fstat(opened).st_size - _LOG_BYTES))
        text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    parts = _RECORD.split(text)[1:]
    records = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return [
        {"kind": _kind(level, text), "time": time, "text": redact_text(_without_traceback(text))}
        for time, level, text in records
        if level in _EVENT_LEVELS or _TRACEBACK in text
    ]


def _kind(level: str, text: str) -> str:
    return "guard" if text.startswith("guard ") else "error" if _TRACEBACK in text else level.lower()


def _without_traceback(text: str) -> str:
    """Return the message and, in place of a traceback, the error at its end."""
    message, traceback, error = text.rstrip().rpartition(_TRACEBACK)
    if not traceback:
        return error
    lines = error.splitlines()
    begin = next((n for n in reversed(range(len(lines))) if lines[n] and not lines[n][0].isspace()), 0)
    return f"{message.partition(_TRACEBACK)[0].strip()}: " + " ".join(line.strip() for line in lines[begin:])


def _folders(root: Path, depth: int) -> Iterator[Path]:
    yield root
    if depth == 0:
        return
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name, reverse=True)
    except OSError:
        return
    for entry in entries:
        if entry.name not in _SKIPPED and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _folders(Path(entry.path), depth - 1)


def _read(folder: RunFolder, path: Path) -> dict[str, Any]:
    """Read a JSON file of the folder. {} if it is missing, damaged or a link."""
    try:
        return {} if path.is_symlink() or not path.is_file() else folder.read_json(path)
    except (RlhfError, OSError):
        return {}


def _status(summary: Mapping[str, Any]) -> str:
    status = str(summary.get("status", "unfinished"))
    pid = summary.get("pid")
    if status != "running" or summary.get("host") != socket.gethostname() or not isinstance(pid, int):
        return status
    return status if _exists(pid) else "killed"


def _exists(pid: int) -> bool:
    try:
        return psutil.pid_exists(pid)
    except OverflowError:  # a damaged file: no process has this id
        return False


def _name(section: Any, key: str = "name") -> str | None:
    value = section.get(key) if isinstance(section, Mapping) else section
    return value if isinstance(value, str) else None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
