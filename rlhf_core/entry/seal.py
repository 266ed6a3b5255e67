"""Which code a run was allowed to run, so that a resume of it runs the same without being told again.

A run folder may have come from a stranger, so its word alone is not believed: the list in `manifest.json` is sealed
(HMAC-SHA256 over the list and the folder's place) with a key that only this user can read, as Jupyter does it with
trusted notebooks. A folder that was moved, changed or made by someone else needs `--trust`.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plugins.trust import FileTrust
from ..runfolder.folder import RunFolder

_KEY_BYTES = 32


def seal(folder: Path, trusted: FileTrust) -> dict[str, Any]:
    """The manifest's entry about the files that a run in `folder` runs and the programs that it starts.

    Nothing where there is neither, or no key. What a program is may depend on the working folder, which is noted.
    """
    key = _key(make=True) if trusted.files or trusted.commands else None
    if key is None:
        return {}
    commands = sorted([os.getcwd(), *command] for command in trusted.commands)
    entry = {"files": sorted(map(str, trusted.files)), "commands": commands}
    return {"trusted_files": {**entry, "seal": _signed(key, folder, entry)}}


def sealed(folder: Path) -> FileTrust:
    """The trust given to the run in `folder`, where this user's key confirms it; for programs, on that machine only."""
    opened = RunFolder.read(folder)
    entry = opened.read_json(opened.manifest).get("trusted_files")
    key = _key(make=False)
    if key is None or not isinstance(entry, dict):
        return FileTrust()
    given = entry.pop("seal", None)
    if not isinstance(given, str) or not hmac.compare_digest(_signed(key, folder, entry).encode(), given.encode()):
        return FileTrust()
    here = os.getcwd()  # from here on `entry` is as `seal` made it
    started = frozenset(tuple(command) for place, *command in entry["commands"] if place == here)
    return FileTrust(files=frozenset(map(Path, entry["files"])), commands=started)


def _signed(key: bytes, folder: Path, entry: Mapping[str, Any]) -> str:
    text = json.dumps([str(folder.resolve()), entry], sort_keys=True)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _key(*, make: bool) -> bytes | None:
    """This user's key; None where there is none, or none can be kept."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    path = Path(base) / "rlhf" / "run-folder-key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{os.getpid()}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            os.replace(new, path)
        key = path.read_bytes()
    except OSError:
        return None  # a convenience: without it, a resume asks for --trust
    return key if len(key) == _KEY_BYTES else None
