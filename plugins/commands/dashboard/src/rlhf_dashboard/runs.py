"""Which run folders lie in a folder, and what their small files say.

A run is asked for by an id that is made from its path; only ids of folders that were found are answered, so no request
can name a path. Links are not followed.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import RlhfError
from rlhf_core.runfolder import RunFolder
from rlhf_core.util import redact_mapping, redact_text
from rlhf_pages import known_line, known_values

from .tail import gained

_DEPTH = 3
_MOST_RUNS = 500
_LOG_BYTES = 256 * 2**10
_LINE_BYTES = 64 * 2**10
_RECORD = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* ([A-Z]+) \S+: ", re.MULTILINE)
_TOLD = {"WARNING", "ERROR", "CRITICAL"}
_TRACEBACK = "Traceback (most recent call last):"
_MOST_EVENTS = 200
_OTHERS = {"checkpoints", "model", "adapter", "tensorboard", "control"}
"""Folders of a run in which no run is looked for."""


class Runs:
    """The runs at or below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[str, tuple[str, RunFolder]] = {}
        self._configs: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def find(self, run: str) -> RunFolder | None:
        """The folder of an id, None where there is none such."""
        if run not in self._found:
            self._scan()
        return self._found[run][1] if run in self._found else None

    def rows(self) -> list[dict[str, Any]]:
        """A row a run, the one written to last first. `parent`: the run in whose folder it is."""
        self._scan()
        ids = {folder.path: run for run, (_, folder) in self._found.items()}
        rows = [
            {**self._row(run, name, folder), "parent": next((ids[up] for up in folder.path.parents if up in ids), None)}
            for run, (name, folder) in self._found.items()
        ]
        return sorted(rows, key=lambda row: row["changed"], reverse=True)

    def details(self, folder: RunFolder) -> dict[str, Any]:
        """The content of one run's page beside its curves and samples."""
        manifest = _read(folder, folder.manifest)
        told = manifest.pop("events", None)
        events = [known_values(event) for event in told if isinstance(event, dict)] if isinstance(told, list) else []
        return {
            "summary": known_values(_read(folder, folder.summary)),
            "config": self._config(folder),
            "manifest": known_values(manifest),
            "events": [*events, *log_events(folder.log)][-_MOST_EVENTS:],
            "actors": known_values(_read(folder, folder.path / "ray.json")),
        }

    def _scan(self) -> None:
        folders = _folders(self._root, _DEPTH)
        found = {}
        for path in folders:
            name = path.relative_to(self._root).as_posix() if path != self._root else path.resolve().name
            try:
                found[hashlib.sha256(os.fsencode(path)).hexdigest()[:16]] = (name, RunFolder.read(path))
            except (RlhfError, OSError):
                continue  # no run, or one with a link or a device in the place of a file
            if len(found) == _MOST_RUNS:
                break
        self._found = found

    def _row(self, run: str, name: str, folder: RunFolder) -> dict[str, Any]:
        summary = known_values(_read(folder, folder.summary))
        last = gained(folder.metrics, None, known_line, newest_bytes=_LINE_BYTES).lines
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
        """The run file; YAML is slow to read, so it is kept until the file changes."""
        try:
            found = folder.config.stat()
            key = (found.st_mtime_ns, found.st_size)
            if self._configs.get(folder.config, (None,))[0] != key:
                self._configs[folder.config] = (key, known_values(redact_mapping(folder.read_config())))
            return self._configs[folder.config][1]
        except (RlhfError, OSError):
            return {}


def log_events(path: Path) -> list[dict[str, Any]]:
    """The warnings and errors at the end of a log: what guards said, and what ended the run."""
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
        {"kind": _kind(level, said), "time": time, "said": redact_text(_without_traceback(said))}
        for time, level, said in records
        if level in _TOLD or _TRACEBACK in said
    ]


def _kind(level: str, said: str) -> str:
    return "guard" if said.startswith("guard ") else "error" if _TRACEBACK in said else level.lower()


def _without_traceback(said: str) -> str:
    """The message, and of a traceback the error at its end."""
    message, traceback, error = said.rstrip().rpartition(_TRACEBACK)
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
        if entry.name not in _OTHERS and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _folders(Path(entry.path), depth - 1)


def _read(folder: RunFolder, path: Path) -> dict[str, Any]:
    """A JSON file of the folder; {} where it is missing, broken or a link."""
    try:
        return {} if path.is_symlink() or not path.is_file() else folder.read_json(path)
    except (RlhfError, OSError):
        return {}


def _status(summary: Mapping[str, Any]) -> str:
    status = str(summary.get("status", "unfinished"))
    pid = summary.get("pid")
    if status != "running" or summary.get("host") != socket.gethostname() or not isinstance(pid, int):
        return status
    return status if Path(f"/proc/{pid}").exists() or not Path("/proc/self").exists() else "killed"


def _name(section: Any, key: str = "name") -> str | None:
    value = section.get(key) if isinstance(section, Mapping) else section
    return value if isinstance(value, str) else None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
