"""Resumes a run: its config, its checkpoint, and the options that must not change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.fitting import Change, config_changes
from ..config.resolve import without_removed
from ..errors import UserInputError
from ..plugins.discovery import SINGULAR, discover
from ..plugins.names import KNOWN
from ..runfolder.checkpoints import CheckpointStore, find_complete_checkpoint
from ..runfolder.folder import RunFolder, find_newest
from ..util.did_you_mean import fold
from ..util.redact import redact_mapping
from ..wiring.inputs import RunInputs

_FIXED = ("model.path", "model.lora", "model.quantize", "algorithm.name", "optimizer.name", "prompts")
"""Options, with all below them, that a checkpoint depends on. Changing them would make it another run."""


def find_resumed_run(resume: str | None, output: Path | None) -> Path | None:
    """Return the folder of the run that `--resume` continues, or None for a new run (`auto` may start one in `output`).

    Raises:
        UserInputError: `auto` finds no run, `output` is another folder, or a plugin of the run is not installed.
    """
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        folder = path.parent.parent if path.parent.name == "checkpoints" else path
        if output is not None and RunFolder(folder).holds_run and folder.resolve() != output.resolve():
            raise UserInputError(
                f"a resume of {resume} continues in {folder}, not in {output}",
                where="--resume",
                hint=f"--output {folder}, or start a new run with its config (--from {folder}) or policy (--model)",
            )
        found = folder if output is None else output
    elif output is not None:
        if not RunFolder(output).has_begun:
            return None
        found = output
    elif (newest := find_newest()) is not None:
        found = newest
    else:
        raise UserInputError("found no run to continue in runs/", where="--resume auto", hint="add --output DIR")
    check_owners(RunFolder(found))
    return found


def load_run_config(path: Path) -> dict[str, Any]:
    """Read the `config.yaml` of a run to continue, with model paths inside the folder updated if the folder moved.

    Args:
        path: the run folder.

    Returns:
        The resolved run file, without options that were removed since.

    Raises:
        UserInputError: the folder does not contain a config, or a plugin of the run is not installed.
    """
    folder = RunFolder(path)
    config = without_removed(folder.read_config())
    check_owners(folder)
    if not config:
        raise UserInputError(
            "the run ended before it wrote its config.yaml" if folder.has_begun else "found no run to continue",
            where=str(path),
            hint="also pass the run file: rlhf train RUN.yaml --output DIR --resume auto",
        )
    models = {model.parts[-2:]: str(model) for model in path.glob("*/model") if model.is_dir()}

    def relocate(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: relocate(each) for key, each in value.items()}
        return models.get(Path(value).parts[-2:], value) if isinstance(value, str) else value

    return {key: relocate(each) for key, each in config.items()}


def check_owners(folder: RunFolder) -> None:
    """Raise `UserInputError` if a plugin of the run is not installed."""
    for kind, owners in folder.read_json(folder.manifest).get("owners", {}).items():
        for name, owner in owners.items():
            if fold(name) not in discover(kind):
                distribution = KNOWN.get(kind, {}).get(name, owner.partition(" ")[0])  # it may have moved since
                same = owner.startswith(f"{distribution} ")
                raise UserInputError(
                    f"the run has the {SINGULAR.get(kind, kind)} {name} of {owner}, which is not installed",
                    where=str(folder.path),
                    hint=f"pip install {owner.replace(' ', '==') if same else distribution}",
                )


def find_checkpoint(resume: str, output: Path, *, restart: bool = False) -> Path | None:
    """Return the checkpoint that `--resume` refers to: the newest complete one of the run, or the named folder.

    Returns None for `auto` if the run ended before it wrote one, and starts again. A run that has made updates starts
    again only with `restart`.

    Raises:
        UserInputError: there is no run or complete checkpoint, or the run's checkpoints are lost.
    """
    folder = output if resume == "auto" else Path(resume)
    if (checkpoint := find_complete_checkpoint(folder)) is not None:
        return checkpoint
    store = CheckpointStore(folder / "checkpoints")
    problem = "found no checkpoint to continue from"
    elsewhere = f"start a new run like it: rlhf train --from {folder} --output DIR"
    if resume != "auto" or store.steps():
        has_config = RunFolder(folder).config.exists()
        raise UserInputError(problem, where=str(folder), hint=elsewhere if has_config else "start without --resume")
    if lost := store.named():
        names = ", ".join(f"checkpoints/{name}" for name in lost)
        raise UserInputError(
            f"{problem}: {names} is missing, which the run had written",
            where=str(folder),
            hint=f"put it back (was the disk purged?), or {elsewhere}",
        )
    if has_updates(RunFolder(folder)) and not restart:
        raise UserInputError(
            f"{problem}: metrics.jsonl has the updates of a run, but checkpoints/ lacks a step-* folder",
            where=str(folder),
            hint=f"--resume auto --restart begins again here and discards these updates, or {elsewhere}",
        )
    return None


def has_updates(folder: RunFolder) -> bool:
    """Whether the run in `folder` has made an update."""
    return folder.metrics.exists() and folder.metrics.stat().st_size > 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """How a resume continues a run."""

    checkpoint: Path | None
    """None if the run ended before it wrote one, and starts again."""
    changes: Sequence[Change]
    """Options that the resume changes."""


def plan_resume(resume: str, folder: RunFolder, inputs: RunInputs, *, restart: bool) -> Resumed:
    """Return checkpoint and changed options of a resume of the run in `folder`. Arguments as for `find_checkpoint`.

    Raises:
        UserInputError: model, algorithm, optimizer or prompts differ from the checkpoint's, or see `find_checkpoint`.
    """
    checkpoint = find_checkpoint(resume, folder.path, restart=restart)
    is_again = checkpoint is None  # it may change everything
    before = folder.read_config()
    if not before:
        return Resumed(checkpoint, [])
    manifest = folder.read_json(folder.manifest)
    working_folder = Path(manifest.get("working_folder", "."))
    changes = [
        change
        for change in config_changes(redact_mapping(before), redact_mapping(inputs.resolved.to_mapping()))
        if change.key != "model.path" or not _is_same_model(change, folder, working_folder, is_again=is_again)
    ]
    if not is_again:
        problems = [f"{each.key}: {each.before!r} -> {each.after!r}" for each in changes if _is_fixed(each.key)]
        digest = manifest.get("data_digest")
        if not problems and digest and str(digest).removeprefix("sha256:") != inputs.prompts.digest:
            problems = ["prompts: the records differ from those that the run was trained on"]
        if problems:
            raise UserInputError(
                "a resume keeps the model, algorithm, optimizer and prompts of the run:\n" + "\n".join(problems),
                where=str(folder.path),
                hint="restore these options, or start a new run with another --output",
            )
    return Resumed(checkpoint, changes)


def _is_fixed(key: str) -> bool:
    # For another prompts.path, the digest shows whether the data differ.
    return key != "prompts.path" and any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED)


def _is_same_model(change: Change, folder: RunFolder, working_folder: Path, *, is_again: bool) -> bool:
    """Whether both paths are the same folder, or a model made in the run folder before and after it was moved."""
    before, after = str(change.before), os.path.realpath(str(change.after))
    if Path(after).parent.parent == folder.path.resolve():
        return is_again or Path(before).parts[-2:] == Path(after).parts[-2:]
    return after == os.path.realpath(working_folder / before)
