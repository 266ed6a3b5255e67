"""Compare what each distribution imports with what its manifest declares, by deptry: `python release/dependencies.py`.

Exceptions, with their reasons, are in `[tool.deptry]` of each `pyproject.toml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from distributions import ROOT, folders, run_module

_DEADLINE_SECONDS = 120.0


def problems(folder: Path) -> str:
    """Return deptry's report of one distribution, empty if nothing is missing and nothing is unused."""
    sources = ["rlhf_core", "cli"] if folder == ROOT else ["src"]
    done = run_module(folder, "deptry", "--no-ansi", *sources, seconds=_DEADLINE_SECONDS)
    return f"{folder.relative_to(ROOT)}:\n{done.stdout}" if done.returncode else ""


def main() -> int:
    """Check all distributions and print what is wrong."""
    found = [report for folder in folders() if (report := problems(folder))]
    print("\n".join(found) or f"deptry: {len(folders())} manifests declare what their sources import")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
