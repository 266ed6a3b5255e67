"""The distributions of this repository: the core at the root, and one in each folder of a library or plugin."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLOBS = ("libraries/*/pyproject.toml", "plugins/*/*/pyproject.toml", "start/pyproject.toml")
VERSION_FILE = ROOT / "VERSION"
_NAME = re.compile(r'^name = "([^"]+)"$', re.MULTILINE)


def folders() -> list[Path]:
    """Return the folders with the `pyproject.toml` of a distribution, the root first."""
    return [ROOT, *(path.parent for glob in GLOBS for path in sorted(ROOT.glob(glob)))]


def name_of(folder: Path) -> str:
    """Return the distribution's name. Raises `SystemExit` for a manifest without one."""
    found = _NAME.search((folder / "pyproject.toml").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{folder / 'pyproject.toml'}: [project] has no name")
    return found[1]


def version() -> str:
    """Return the contents of the file VERSION."""
    return VERSION_FILE.read_text(encoding="utf-8").strip()
