"""Give every distribution the version of the file VERSION: `python release/version.py [NEW] [--check]`.

The file VERSION determines the version. A manifest must contain it, too, since the source distribution of a plugin is
built without the rest of this repository. This script writes it to `version = "…"` and to the requirements between
distributions of this repository (`rlhf-core==…`).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from distributions import ROOT, VERSION_FILE, folders, name_of, version

_RELEASE = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?(?:\.dev\d+)?")


def manifests(wanted: str) -> dict[Path, str]:
    """Return the correct text of each file that contains the version: manifests and the citation."""
    names = "|".join(re.escape(name_of(folder)) for folder in folders())
    pin = re.compile(rf'"((?:{names})(?:\[[^\]]*\])?)==[^",;]+')
    found = {}
    for folder in folders():
        path = folder / "pyproject.toml"
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'^version = "[^"]*"$', f'version = "{wanted}"', text, count=1, flags=re.M)
        found[path] = pin.sub(rf'"\1=={wanted}', text)
    citation = ROOT / "CITATION.cff"
    found[citation] = re.sub(r"^version: .*$", f"version: {wanted}", citation.read_text(encoding="utf-8"), flags=re.M)
    return found


def stale() -> list[str]:
    """Return the manifests whose version differs from VERSION, with the command to run."""
    wrong = [path for path, text in manifests(version()).items() if path.read_text(encoding="utf-8") != text]
    return [f"{path.relative_to(ROOT)} is not at {version()}: run python release/version.py" for path in wrong]


def main() -> int:
    """Write the manifests, or with --check report differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("new", nargs="?", help="the next version, such as 0.2.0. Default: the one in VERSION")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and exit with 1 if a manifest would change"
    )
    asked = parser.parse_args()
    if asked.new is not None and not _RELEASE.fullmatch(asked.new):
        parser.error(f"{asked.new} is no version such as 0.2.0 or 0.2.0rc1")
    if asked.check:
        print(*stale(), sep="\n", end="")
        return int(bool(stale()))
    if asked.new is not None:
        VERSION_FILE.write_text(f"{asked.new}\n", encoding="utf-8")
    for path, text in manifests(version()).items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
