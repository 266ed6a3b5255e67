"""The account a run folder gives of how its run began: config, manifest, and what differs from what it builds on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .config_changes import config_changes
from .control import ControlBox
from .launch_env import read_launch_env
from .manifest import collect_manifest, full_command
from .runfolder import RunFolder
from .transport import RunRequest
from .util.redact import redact_mapping

logger = logging.getLogger("rlhf")

RESUME = "resume"
RECREATE = "recreate"
"""Kinds of the manifest's events."""

_EXPECTED_TO_DIFFER = {"command", "events", "seed"}
"""`seed` is an option, and reported as one."""


def begin_record(request: RunRequest, origin: Path | None) -> None:
    """Write `config.yaml` and `manifest.json`; say what a resume changes, or what differs from the run `origin`."""
    folder = request.folder
    before, earlier = folder.read_config(), folder.read_json(folder.manifest)
    config = request.resolved.to_mapping()
    folder.write_config(config)
    manifest = collect_manifest(
        seed=request.resolved.run.train.seed,
        command=full_command(),
        data_digest=f"sha256:{request.prompts.digest}",
        num_processes=read_launch_env().world_size,
    )
    folder.write_manifest({**manifest, "events": earlier.get("events", []) if request.resume is not None else []})
    ControlBox(folder.control).clear()
    if request.resume is not None:
        _tell_resume(folder, request.resume, before, config)
    if origin is not None:
        _tell_recreation(folder, RunFolder.read(origin), config, manifest)


def _tell_resume(folder: RunFolder, checkpoint: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    changes = config_changes(redact_mapping(before), redact_mapping(after)) if before else []
    for change in changes:
        logger.warning("resumed with a changed config: %s", change)
    folder.add_event(RESUME, {"checkpoint": checkpoint.name, "changes": [change.to_json() for change in changes]})


def _tell_recreation(
    folder: RunFolder, origin: RunFolder, config: Mapping[str, Any], manifest: Mapping[str, Any]
) -> None:
    earlier = origin.read_json(origin.manifest)
    options = [
        f"{change.key}: {change.before!r} -> {change.after!r}"
        for change in config_changes(redact_mapping(origin.read_config()), redact_mapping(config))
    ]
    differences = [*options, *_differences(earlier, manifest)]
    for difference in differences:
        logger.warning("differs from %s: %s", origin.path, difference)
    folder.add_event(RECREATE, {"run": str(origin.path), "differences": differences})


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What the same config may give other numbers by: versions, data, code, machine."""
    for key, value in after.items():
        if key in _EXPECTED_TO_DIFFER or key not in before or before[key] == value:
            continue
        if isinstance(value, Mapping) and isinstance(before[key], Mapping):
            names = [*value, *(name for name in before[key] if name not in value)]
            for name in (name for name in names if before[key].get(name) != value.get(name)):
                yield f"{key}.{name}: {before[key].get(name)!r} -> {value.get(name)!r}"
        else:
            yield f"{key}: {before[key]!r} -> {value!r}"
