"""What must hold of a run folder, however often its run was struck."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_placement import SAMPLES, STEPS
from chaos_session import Wrong, steps_saved, wait

from rlhf_core.runfolder.checkpoints import find_damage

_DIFFERS = ("time/", "memory/", "tokens_per_second/", "reward_calls/", "transport/", "sync/seconds")
"""Keys of metrics that differ between equal runs."""
_MAY_BE_THERE = ("control", "ray.json")
"""Made by the first command; left by a driver that was killed, until the next one."""
_OF_A_SESSION = ("performance.json", "model/README.md")
"""Written at the end of a session that trained. One that was killed or terminated twice may leave none."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Untouched:
    """A run that no fault has struck."""

    folder: Path
    metrics: Sequence[Line] = field(init=False)
    samples: Sequence[Line] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", read_metrics(self.folder))
        object.__setattr__(self, "samples", read(self.folder / "samples.jsonl"))


def read(path: Path) -> list[Line]:
    """The whole lines; what a kill has torn at the end is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_metrics(folder: Path) -> list[Line]:
    lines = read(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(_DIFFERS)} for line in lines]


def check_begun(folder: Path, untouched: Untouched, changed_at: int | None, damaged: Sequence[int] = ()) -> None:
    """What there is so far: the beginning of the untouched run (up to the step at which it was moved elsewhere),
    nothing twice, and every checkpoint whole but those damaged on purpose."""
    metrics, samples = read_metrics(folder), read(folder / "samples.jsonl")
    _check_same("metrics.jsonl", metrics, untouched.metrics, "step", changed_at)
    samples_at = None if changed_at is None else changed_at * SAMPLES // STEPS
    _check_same("samples.jsonl", samples, untouched.samples, "sample_id", samples_at)
    for step in steps_saved(folder):
        problem = find_damage(folder / f"checkpoints/step-{step}")
        if problem is not None and step not in damaged:
            raise Wrong(f"checkpoint {step}: {problem}")


def _check_same(name: str, found: Sequence[Line], expected: Sequence[Line], key: str, changed_at: int | None) -> None:
    if [line[key] for line in found] != [line[key] for line in expected[: len(found)]]:
        raise Wrong(f"{name} holds {[line[key] for line in found]}")
    for ours, theirs in zip(found[:changed_at], expected, strict=False):
        keys = ours.keys() | theirs.keys()
        if ours is found[-1]:  # a run that ended in an evaluation has written the line that it would have stood on
            keys = {each for each in keys if each in ours or not each.startswith("eval/")}
        differing = [each for each in sorted(keys) if ours.get(each) != theirs.get(each)]
        if differing:
            values = [(each, ours.get(each), theirs.get(each)) for each in differing[:5]]
            raise Wrong(f"{name}, {key} {ours[key]}, is not what the untouched run has: {values}")


def check_done(folder: Path, untouched: Untouched, changed_at: int | None) -> None:
    """A run that came to its end: all of the untouched one's lines, its model and files, and nothing else."""
    check_begun(folder, untouched, changed_at)
    if changed_at is None and read_metrics(folder)[-1] != untouched.metrics[-1]:
        raise Wrong("the last line of metrics.jsonl is not the untouched run's")
    for name, expected in (("metrics.jsonl", STEPS), ("samples.jsonl", SAMPLES)):
        if len(read(folder / name)) != expected:
            raise Wrong(f"{name} has {len(read(folder / name))} lines of {expected}")
    model = "model/model.safetensors"
    if changed_at is None and (folder / model).read_bytes() != (untouched.folder / model).read_bytes():
        raise Wrong("the model is not the untouched run's")
    last = (folder / "checkpoints/last").read_text().strip()
    if last != f"step-{STEPS}":
        raise Wrong(f"checkpoints/last names {last}")
    left = _names(folder) - _names(untouched.folder) - set(_MAY_BE_THERE)
    missing = _names(untouched.folder) - _names(folder) - set(_OF_A_SESSION)
    if left or missing:
        raise Wrong(f"left behind: {sorted(left)}; missing: {sorted(missing)}")


def _names(folder: Path) -> set[str]:
    """Files and folders, without what lies in a checkpoint."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in found if not name.startswith("checkpoints/step-")}


def shared_memory() -> set[str]:
    """What lies in the machine's shared memory."""
    return set(os.listdir("/dev/shm"))


def check_shared_memory(before: set[str]) -> None:
    """What came since is somebody's: nothing in it outlives all who have it open."""
    wait(lambda: not (shared_memory() - before) or not _orphans(before), f"an end of {_orphans(before)}", every=0.2)


def _orphans(before: set[str]) -> set[str]:
    new = shared_memory() - before
    for process in psutil.process_iter() if new else ():
        with suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            new -= {name for name in new if name in maps}
            new -= {Path(each.path).name for each in process.open_files()}
    return new
