"""The runs that faults strike: ten or so short steps in each placement, and a reward that can be made to misbehave."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_testing.runs import tiny_run

STEPS = 12
SAMPLES = 48
REWARD_SECONDS = 3.0
"""Deadline of a reward: more than a call of these takes on a busy machine, and what a hung one costs."""
RANK_SECONDS = 15.0
HEARTBEAT_SECONDS = 15.0
"""Longest silence of another rank, or of an actor, before the run ends."""
TRAPS = ("hang", "raise", "die")

_BASE: Mapping[str, Any] = {
    "train": {"episodes": 6, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4},
    "checkpoint": {"every_episodes": 2, "keep": 2},
    "eval": {"every_episodes": 3, "num_prompts": 4},
    "reward_scaling": {"normalise": True},
}
_REWARD = '''
"""Counts its calls in a file, and does what a file beside it asks for."""

import os
import signal
import threading
from pathlib import Path

FOLDER = Path(__file__).parent


def spread(rollouts) -> list[float]:
    with (FOLDER / "calls").open("a") as calls:
        calls.write("x")
    if (FOLDER / "hang").exists():
        threading.Event().wait()
    if (FOLDER / "raise").exists():
        raise KeyError("asked for by the test")
    if (FOLDER / "die").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(each.completion_ids) % 7 / 7 for each in rollouts]
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a run's processes are, and how they are started soonest."""

    name: str
    changes: Mapping[str, Any]
    flags: Sequence[str] = ()
    options: Mapping[str, bool]
    """Of `running.rlhf`."""
    seconds: float
    """What a run takes on an idle machine, about."""


PLACEMENTS = {
    each.name: each
    for each in (
        Placement(name="local", changes={}, options={}, seconds=1.0),
        Placement(
            name="ranks",
            changes={"strategy": {"name": "ddp", "timeout_seconds": RANK_SECONDS}},
            flags=("--num-processes", "2"),
            options={"quick_ranks": True},
            seconds=3.0,
        ),
        Placement(
            name="ray",
            changes={"transport": {"name": "ray", "max_staleness": 0, "heartbeat_seconds": HEARTBEAT_SECONDS}},
            options={"quick_ray": True},
            seconds=15.0,
        ),
    )
}

ELSEWHERE: Mapping[str, Sequence[Placement]] = {
    "local": [
        Placement(name=name, changes={"strategy": {"name": name}}, options={}, seconds=1.5)
        for name in ("torch-ddp", "ddp", "low-level-zero", "fsdp")
    ],
    "ranks": [
        Placement(name="one process", changes={"strategy": {"name": "ddp"}}, options={}, seconds=1.0),
        Placement(name="one process, single", changes={"strategy": {"name": "single"}}, options={}, seconds=1.0),
        Placement(
            name="low-level-zero",
            changes={"strategy": {"name": "low-level-zero", "timeout_seconds": RANK_SECONDS}},
            flags=("--num-processes", "2"),
            options={"quick_ranks": True},
            seconds=3.0,
        ),
    ],
    "ray": [
        Placement(name="local", changes={"transport": {"name": "local"}}, options={}, seconds=1.0),
        Placement(
            name="two makers",
            changes={"transport": {**PLACEMENTS["ray"].changes["transport"], "num_makers": 2}},
            options={"quick_ray": True},
            seconds=18.0,
        ),
    ],
}
"""Other strategies, numbers of processes and transports that a run of a placement can go on under."""


def write_run(folder: Path, placement: Placement, *, isolate: bool, background: bool = False) -> Path:
    """The run file of a placement, its reward beside it."""
    reward = folder / "reward.py"
    if not reward.exists():
        reward.write_text(_REWARD)
    changes = {
        **_BASE,
        "rewards": [{"name": f"{reward}:spread", "timeout_seconds": REWARD_SECONDS, "isolate": isolate}],
        **placement.changes,
    }
    if background:
        changes["checkpoint"] = {**_BASE["checkpoint"], "background": {}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tiny_run(changes)))
    return path


def environment(folder: Path) -> dict[str, str]:
    """One thread, and a folder of its own for temporary files (its path short: sockets are made there).

    Torch keeps compiled kernels, by default in the folder for temporary files, as soon as `torch._dynamo` is imported.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    kernels = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), **kernels}
