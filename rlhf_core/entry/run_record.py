"""The start of a run, as its folder records it: `config.yaml`, `manifest.json`, and what a resume changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..components import LoggerContext
from ..config.changes import Change, config_changes
from ..config.resolve import ResolvedRun
from ..errors import UserInputError
from ..hooks.relay import HookRelay
from ..models.kinds import owner_of
from ..plugins.discovery import discover
from ..plugins.trust import FileTrust, referenced_files
from ..prompts.records import left_out
from ..runfolder.checkpoint_state import read_run_state
from ..runfolder.folder import RunFolder
from ..runfolder.manifest import collect_manifest, full_command
from ..training.decisions import finished_by, keys_of
from ..util.did_you_mean import fold
from ..util.redact import redact_mapping
from .seal import seal

logger = logging.getLogger("rlhf")

RESUME = "resume"
RECREATE = "recreate"
"""Kinds of the manifest's events."""

_EXPECTED_TO_DIFFER = {"command", "events", "seed", "trusted_files"}
"""`seed` is an option, and reported as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run as it is about to begin in its folder."""

    resolved: ResolvedRun
    data_digest: str
    data_counts: Mapping[str, int]
    num_processes: int
    is_resumed: bool = False
    checkpoint: Path | None = None
    """Where a resume goes on; None where the run ended before it wrote one, and starts again."""
    changes: Sequence[Change] = ()
    """Options that a resume changes."""
    origin: Path | None = None
    """Folder of the run that this one makes again."""


def already_done(folder: RunFolder, plan: RunPlan) -> str | None:
    """Why a resume has nothing to do: a guard or hook ended the run as done, and is set as it was. None: it has."""
    if plan.checkpoint is None or folder.read_json(folder.summary).get("status") != "done":
        return None
    ended = finished_by(read_run_state(plan.checkpoint), plan.resolved)
    if ended is None or not folder.model.is_dir():
        return None
    return f"already done: {ended.by}: {ended.reason}; to go on, change {keys_of(ended.by, plan.resolved)}"


def begin_record(folder: RunFolder, plan: RunPlan) -> None:
    """Write `config.yaml` and `manifest.json`; note what a resume changes, or what differs from `plan.origin`."""
    earlier = folder.read_json(folder.manifest)
    config = plan.resolved.to_mapping()
    manifest = collect_manifest(
        seed=plan.resolved.run.train.seed,
        command=full_command(),
        data_digest=plan.data_digest,
        data_counts=plan.data_counts,
        num_processes=plan.num_processes,
    )
    kind = owner_of(plan.resolved.run.model.path)
    owners: dict[str, dict[str, str]] = {}
    for each in (*plan.resolved.selected, *([] if kind is None else [kind])):
        if fold(each.name) in discover(each.kind):  # not a file, or a function of this process
            owners.setdefault(each.kind, {})[each.name] = each.owner
    manifest["owners"] = owners
    code = seal(folder.path, _code_run(plan.resolved))
    folder.write_manifest({**manifest, **code, "events": earlier.get("events", []) if plan.is_resumed else []})
    folder.write_config(config)  # behind it: a config that is there can be gone on with, and its code is trusted
    if plan.is_resumed:
        folder.add_event(
            RESUME,
            {
                "checkpoint": None if plan.checkpoint is None else plan.checkpoint.name,
                "changes": [change.to_json() for change in plan.changes],
            },
        )
    for change in plan.resolved.adapted:
        logger.info("adapted to the run: %s", change)
    if told := left_out(plan.data_counts):
        logger.warning(told) if plan.data_counts.get("too_long") else logger.info(told)
    if plan.origin is not None:
        _tell_recreation(folder, RunFolder.read(plan.origin), config, manifest)


def _code_run(resolved: ResolvedRun) -> FileTrust:
    """Files of code and programs that the run names anywhere, and the model where its code is run."""
    model = resolved.run.model
    files = referenced_files(resolved.to_mapping())
    own = frozenset([Path(model.path).resolve()]) if model.trust_remote_code else frozenset()
    return FileTrust(files=files | own, commands=resolved.commands)


def tell_resume(plan: RunPlan) -> None:
    """Warn of a run that starts again, or has nothing left to do, and of each changed option, with what that means."""
    episodes = plan.resolved.run.train.episodes
    if plan.is_resumed and plan.checkpoint is None:
        logger.warning("the run ended before its first checkpoint: it starts again")
    elif plan.checkpoint is not None and read_run_state(plan.checkpoint).next_episode >= episodes:
        hint = "only model and report are made; to train on: --set train.episodes=N"
        logger.warning("all %d episodes are trained already: %s", episodes, hint)
    for change in plan.changes:
        what = change if plan.checkpoint is not None else f"{change.key}: {change.before!r} -> {change.after!r}"
        logger.warning("resumed with a changed config: %s", what)


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
    """Differences that can change the numbers of the same config: versions, data, code, machine."""
    for key, value in after.items():
        if key in _EXPECTED_TO_DIFFER or key not in before or before[key] == value:
            continue
        if isinstance(value, Mapping) and isinstance(before[key], Mapping):
            names = [*value, *(name for name in before[key] if name not in value)]
            for name in (name for name in names if before[key].get(name) != value.get(name)):
                yield f"{key}.{name}: {before[key].get(name)!r} -> {value.get(name)!r}"
        else:
            yield f"{key}: {before[key]!r} -> {value!r}"


def refuse_output(path: Path) -> None:
    """Raise `UserInputError` for what cannot be the folder of a new run: it holds one, or cannot be made."""
    RunFolder(path).refuse_run()
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "is no folder that can be written to" if there.is_dir() else "is a file, not a folder"
        raise UserInputError(f"{there} {what}", where=str(path), hint="choose another --output")


def register_run_hooks(relay: HookRelay, resolved: ResolvedRun, run_folder: Path) -> None:
    """The loggers of the run."""
    from ..loggers.relay import register_loggers

    context = LoggerContext(run_folder=run_folder, run=redact_mapping(resolved.to_mapping()))
    register_loggers(relay, resolved.loggers, context)
