"""Which files of code a run was allowed to run, so that a resume of it runs the same without being told again.

A run folder may have come from a stranger, so its word alone is not believed: the list in `manifest.json` is sealed
(HMAC-SHA256 over the list and the folder's place) with a key that only this user can read, as Jupyter does it with
trusted notebooks. A folder that was moved, changed or made by someone else needs `--trust`.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

from ..runfolder.folder import RunFolder

_KEY_BYTES = 32


def seal(folder: Path, files: frozenset[Path]) -> dict[str, Any]:
    """What the manifest says of the files that a run in `folder` runs; nothing where there is none or no key."""
    key = _key(make=True) if files else None
    if key is None:
        return {}
    listed = sorted(map(str, files))
    return {"trusted_files": {"files": listed, "seal": _signed(key, folder, listed)}}


def sealed_files(folder: Path) -> frozenset[Path]:
    """The files that the run in `folder` was allowed to run, where this user's key says so."""
    opened = RunFolder.read(folder)
    said = opened.read_json(opened.manifest).get("trusted_files")
    key = _key(make=False)
    if key is None or not isinstance(said, dict):
        return frozenset()
    listed, given = said.get("files"), said.get("seal")
    if not isinstance(listed, list) or not isinstance(given, str) or not all(isinstance(each, str) for each in listed):
        return frozenset()
    is_ours = hmac.compare_digest(_signed(key, folder, listed).encode(), given.encode())
    return frozenset(map(Path, listed)) if is_ours else frozenset()


def _signed(key: bytes, folder: Path, listed: list[str]) -> str:
    text = json.dumps([str(folder.resolve()), listed])
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
