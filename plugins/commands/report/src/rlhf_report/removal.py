"""Removes run folders, and refuses everything else."""

from __future__ import annotations

import os
import shutil
import socket
from fnmatch import fnmatchcase
from pathlib import Path

from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.runfolder import RunFolder
from rlhf_pages import find_runs, read_run_json

_NEEDED = (".lock", "summary.json")
"""Files that every run folder contains."""
_KEPT_TO_THE_END = ("config.yaml", "manifest.json", *_NEEDED)
"""Files by which a run folder is recognized. They are removed last, so that an aborted removal can be repeated."""
_OF_RUNS = (
    *(*_KEPT_TO_THE_END, "metrics.jsonl", "samples.jsonl", "run.log", "performance.json", "evaluation-before.json"),
    *("checkpoints", "model", "adapter", "control", "journal", "images", "reward-cache", "report.html", "plot-*.png"),
    *("actors.json", "ray*.json", "tensorboard", "profile", "wandb", "wandb-id", "mlflow.db", "mlflow-run-id"),
    "mlflow-artifacts",
)
"""Patterns of the names that runs write, those of plugins included. Everything else is named before it is removed."""


def check_removable(path: Path) -> RunFolder:
    """Return the folder of a run that may be removed.

    Raises:
        UserInputError: `path` is a link or not the folder of a run, contains the current folder or a repository, or a
            process uses it.
    """
    where = str(path)
    if path.is_symlink():
        raise UserInputError("is a link, not a run folder", where=where, hint=f"pass its target: {path.resolve()}")
    folder = RunFolder.read(path)
    if (lacking := next((name for name in _NEEDED if not (path / name).is_file()), None)) is not None:
        raise UserInputError(
            f"lacks {lacking}, which `rlhf train` writes into each run folder",
            where=where,
            hint="if you are sure that nothing else is in it, delete the folder yourself",
        )
    if Path.cwd().is_relative_to(path.resolve()) or (path / ".git").exists():
        problem = "contains a git repository" if (path / ".git").exists() else "contains the current folder"
        raise UserInputError(problem, where=where, hint="delete the files of the run yourself")
    for name, run in find_runs(path):
        _refuse_running(run, str(path / name) if run.path != path else where)
    return folder


def other_content(folder: RunFolder) -> list[str]:
    """Return the names of files and folders that are probably not of the run, such as those of a user or other runs.

    A run that the config refers to is a stage of the run, as of the quickstart.
    """
    config = folder.config.read_text(encoding="utf-8", errors="replace") if folder.config.is_file() else ""
    return sorted(
        each.name
        for each in folder.path.iterdir()
        if not any(fnmatchcase(each.name, pattern) for pattern in _OF_RUNS)
        and not (RunFolder(each).holds_run and f"/{each.name}/model" in config)
    )


def remove_run(folder: RunFolder) -> None:
    """Remove a run folder and everything in it. Links are removed, not followed.

    Raises:
        UserInputError: a process has taken the folder in the meantime, or a file cannot be removed.
    """
    with RunFolder.take(folder.path, is_new=False):
        try:
            last = [each for name in _KEPT_TO_THE_END if (each := folder.path / name).exists()]
            for path in [each for each in folder.path.iterdir() if each not in last] + last:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            folder.path.rmdir()
        except OSError as error:
            name = os.fsdecode(error.filename) if error.filename else str(folder.path)
            raise UserInputError(
                f"{name} cannot be removed: {error.strerror or error}",
                where=str(folder.path),
                hint="the rest of the run is still there: correct this, then repeat the command",
            ) from error


def _refuse_running(run: RunFolder, where: str) -> None:
    """Raise `UserInputError` if a process uses the folder, or may use it on another machine."""
    summary = read_run_json(run, run.summary)
    host, pid = summary.get("host"), summary.get("pid")
    if run.is_in_use:
        raise UserInputError(
            f"is in use by process {_owner(run)}", where=where, hint=f"stop it first: rlhf control {where} stop"
        )
    if summary.get("status") == "running" and host not in (None, socket.gethostname()):
        raise UserInputError(
            f"may be running as process {pid} on {host}",
            where=where,
            hint=f"repeat the command on {host}, which can find out, or delete the folder yourself",
        )


def _owner(run: RunFolder) -> str:
    try:
        return run.lock.read_text(encoding="ascii").strip() or "unknown"
    except (OSError, ValueError, RlhfError):
        return "unknown"
