"""The distributions of this repository: the core at the root, and one in each folder of a library or plugin.

`python release/distributions.py [NAME]` prints the folders of a distribution and of those of this repository that it
depends on. Without a name it prints all folders.
"""

from __future__ import annotations

import re
import subprocess
import sys
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


def run_module(folder: Path, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with these arguments in a folder. Standard error is part of the output."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )


def closure(name: str) -> list[Path]:
    """Return the folders of a distribution and of those of this repository that it depends on, the root first."""
    import tomllib  # here, since `make` prints its own message for an older Python

    by_name = {name_of(folder): folder for folder in folders()}
    waiting, found = [name], set()
    while waiting:
        if (current := waiting.pop()) in found or current not in by_name:
            continue
        found.add(current)
        project = tomllib.loads((by_name[current] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        waiting += [re.split(r"[^\w-]", each, maxsplit=1)[0] for each in project["dependencies"]]
    return [folder for each, folder in by_name.items() if each in found]


if __name__ == "__main__":
    for chosen in closure(sys.argv[1]) if sys.argv[1:] else folders():
        print(f"./{chosen.relative_to(ROOT)}")
