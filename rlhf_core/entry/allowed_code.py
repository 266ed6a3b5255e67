"""Which code a run was allowed to run, so that a resume of it runs the same without being told again.

A run folder may have come from a stranger, so its word is not believed: what was allowed is noted in this user's own
data folder, under the run folder's place and inode. A folder that was moved or made by someone else needs `--trust`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..plugins.trust import FileTrust, lists_of_text, referenced_files
from ..util.files import is_own
from ..util.jsonl import write_json


def note_allowed(folder: Path, config: Mapping[str, Any]) -> None:
    """Note the files that a run in `folder` runs, and the programs that it starts from this working folder."""
    note, model = _note(folder), config["model"]
    commands = sorted([os.getcwd(), *command] for command in lists_of_text(config))
    files = sorted(map(str, referenced_files(config)))
    if model["trust_remote_code"]:
        files.append(str(Path(model["path"]).resolve()))
    with suppress(OSError):  # a convenience: without it, a resume asks for --trust
        if files or commands:
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(note, {"inode": folder.stat().st_ino, "files": files, "commands": commands})
        else:
            note.unlink(missing_ok=True)


def allowed_before(folder: Path) -> FileTrust:
    """The trust given to the run in `folder`; for programs, in the same working folder only."""
    note = _note(folder)
    try:
        known = json.loads(note.read_text(encoding="utf-8")) if is_own(note) else {}
        inode = folder.stat().st_ino
    except (OSError, ValueError):
        return FileTrust()
    if not isinstance(known, dict) or known.get("inode") != inode:
        return FileTrust()
    here = os.getcwd()
    started = frozenset(tuple(command) for place, *command in known["commands"] if place == here)
    return FileTrust(files=frozenset(map(Path, known["files"])), commands=started)


def _note(folder: Path) -> Path:
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "rlhf" / "allowed-code" / f"{sha256(str(folder.resolve()).encode()).hexdigest()}.json"
