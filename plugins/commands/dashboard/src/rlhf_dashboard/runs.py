"""The data of the page: the runs of a folder.

Requests name a run by an id that is a hash of its path. Only ids of folders that were found are answered, so requests
cannot name paths.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_core.runfolder import RunFolder
from rlhf_core.util import redact_text
from rlhf_pages import find_runs, known_values, read_run_config, read_run_facts, read_run_json

_LOG_BYTES = 256 * 2**10
_RECORD = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* ([A-Z]+) \S+: ", re.MULTILINE)
_EVENT_LEVELS = {"WARNING", "ERROR", "CRITICAL"}
_TRACEBACK = "Traceback (most recent call last):"
_MAX_EVENTS = 200


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
        manifest = read_run_json(folder, folder.manifest)
        listed = manifest.pop("events", None)
        events = [known_values(each) for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        return {
            "summary": read_run_json(folder, folder.summary),
            "config": self._config(folder),
            "manifest": manifest,
            "events": [*events, *log_events(folder.log)][-_MAX_EVENTS:],
            "actors": read_run_json(folder, folder.path / "ray.json"),
        }

    def _scan(self) -> None:
        self._runs = {
            hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:16]: (name, folder)
            for name, folder in find_runs(self._root)
        }

    def _row(self, run: str, name: str, folder: RunFolder) -> dict[str, Any]:
        return {"id": run, "name": name, **asdict(read_run_facts(folder, self._config(folder)))}

    def _config(self, folder: RunFolder) -> dict[str, Any]:
        """Return the run file, cached until the file changes, since YAML is slow to read."""
        try:
            status = folder.config.stat()
        except OSError:
            return {}
        key = (status.st_mtime_ns, status.st_size)
        if self._configs.get(folder.config, (None,))[0] != key:
            self._configs[folder.config] = (key, read_run_config(folder))
        return self._configs[folder.config][1]


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
