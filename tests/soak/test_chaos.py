"""Runs that are struck by a thousand faults at random moments, and by a resume after each (`make soak`).

Faults come in parts of a few minutes each, which do not depend on each other. `RLHF_CHAOS_FAULTS` is their number in
each placement (default `local=850,ranks=120,ray=30`) and `RLHF_CHAOS_SEED` their seed (default 0). `RLHF_CHAOS_FOLDER`
is the folder for `faults.jsonl` (from which a stopped test continues), `table.md` and the folders that failed.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
from chaos_chain import chain
from chaos_folder import Untouched
from chaos_placement import PLACEMENTS, write_run
from chaos_plan import run_chain
from chaos_record import Record
from chaos_session import Session
from quick_ray import worker_source

COUNTS = {
    name: int(number)
    for name, _, number in (
        each.partition("=") for each in os.environ.get("RLHF_CHAOS_FAULTS", "local=850,ranks=120,ray=30").split(",")
    )
}
SEED = int(os.environ.get("RLHF_CHAOS_SEED", "0"))
_WORST = 5
"""Failures after which a part is given up."""
_FAULTS_PER_PART = {"local": 50, "ranks": 15, "ray": 5}
_PARTS = [
    pytest.param(name, part, min(each, COUNTS[name] - part * each), id=f"{name}-{part}")
    for name, each in _FAULTS_PER_PART.items()
    if name in COUNTS
    for part in range(-(-COUNTS[name] // each))
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder() -> Path:
    given = os.environ.get("RLHF_CHAOS_FOLDER")
    # Sockets of Ray lie below it: their paths have at most 107 bytes, too few below a folder of pytest.
    path = Path(given or tempfile.mkdtemp(prefix="chaos-"))
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(autouse=True)
def own_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The key that seals run folders is not the user's."""
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "home"))
    yield


@cache
def untouched_run(root: Path, name: str) -> Untouched:
    """The run without any fault, made once per session by the current code."""
    placement = PLACEMENTS[name]
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    run = write_run(root, placement, isolate=False)
    session = Session(root, root / "run", placement, str(run))
    try:
        session.end((0, "done"))
    finally:
        session.kill()
    return Untouched(root / "run")


@pytest.mark.parametrize(("name", "part", "num_faults"), _PARTS)
def test_whatever_strikes_a_run_a_resume_mends_it(name: str, part: int, num_faults: int, folder: Path) -> None:
    placement = PLACEMENTS[name]
    record = Record(folder / "faults.jsonl", name, SEED, part)
    with worker_source() if name == "ray" else nullcontext():
        untouched = untouched_run(folder / f"untouched-{name}", name)
        number = record.next_chain()
        while (left := num_faults - len(record.own())) > 0:
            failed = [line for line in record.own() if line.outcome == "failed"]
            assert len(failed) < _WORST, f"{len(failed)} failures, see {folder}"
            root = folder / f"{name}-{number}"
            shutil.rmtree(root, ignore_errors=True)
            chance = random.Random(f"{SEED}/{name}/{number}")
            with chain(root, placement, untouched, chance, may_mount=name != "ray") as made:
                run_chain(made, left)
                has_failed = any(each.outcome == "failed" for each in made.struck)
                if has_failed and made.disk is not None:
                    shutil.copytree(made.folder, root / "run")
            if not has_failed:
                shutil.rmtree(root)
            record.add(number, made.struck)
            number += 1
    failed = [line for line in record.own() if line.outcome == "failed"]
    assert not failed, f"{failed[:3]}; all are in {folder / 'faults.jsonl'}"
