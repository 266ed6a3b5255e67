"""Records which code a run was allowed to execute, so that a resume may execute the same code without `--trust`.

The run folder itself may come from a stranger and cannot vouch for its code. The record is therefore in this user's own
data folder, under the run folder's path and inode. A folder that was moved or made by someone else needs `--trust`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from ..util.files import is_own_file
from ..util.jsonl import write_json


def record_allowed_code(folder: Path, files: Iterable[Path]) -> None:
    """Record the code files that the run in `folder` executes."""
    note = _note(folder)
    names = sorted(map(str, files))
    with suppress(OSError):  # only a convenience: without it, a resume needs --trust
        if names:
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(note, {"inode": folder.stat().st_ino, "files": names})
        else:
            note.unlink(missing_ok=True)


def load_allowed_code(folder: Path) -> frozenset[Path]:
    """Return the code files that the run in `folder` was allowed to execute."""
    note = _note(folder)
    try:
        known = json.loads(note.read_text(encoding="utf-8")) if is_own_file(note) else {}
        inode = folder.stat().st_ino
    except (OSError, ValueError):
        return frozenset()
    if not isinstance(known, dict) or known.get("inode") != inode:
        return frozenset()
    return frozenset(map(Path, known["files"]))


def _note(folder: Path) -> Path:
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "rlhf" / "allowed-code" / f"{sha256(str(folder.resolve()).encode()).hexdigest()}.json"
