"""Thousands of wrong inputs: options made from the schemas, broken files, hostile answers. No traceback, no hang,
nothing half-made.

`RLHF_FUZZ_INPUTS` says how many (default 2,000), half of them with a fixed seed. What once failed goes into `corpus/`
and stays there.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_worker import try_command, work
from running import Forked, ended

from rlhf_core import train
from rlhf_testing.runs import tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*"))
INPUTS = int(os.environ.get("RLHF_FUZZ_INPUTS", "2000"))
LONGEST_SECONDS = 120.0
"""An input that takes longer is one that hangs, and its process is killed; most take some ten milliseconds."""
_LOOK_SECONDS = 0.05


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, no hub, no user's key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    yield tmp_path


def report_of(folder: Path, seed: int, first: int) -> tuple[int, list[str]]:
    """Try inputs from `first` on, to the last or to one that hangs: the next number, and what was wrong."""
    report = folder / "report.jsonl"
    report.unlink(missing_ok=True)
    process = Forked(work, str(folder), seed, first, INPUTS // 2, str(report))
    began, waited = "", 0.0
    with ended(process):
        while process.returncode is None and waited < LONGEST_SECONDS:
            before = time.monotonic()
            time.sleep(_LOOK_SECONDS)
            text = report.read_text() if report.exists() else ""
            # Time in which this process itself was stopped does not count.
            waited = waited + min(time.monotonic() - before, 2 * _LOOK_SECONDS) if text == began else 0.0
            began = text
        has_ended = process.returncode is not None
        said = process.output()[1][-2000:]
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    reached = lines[-1]["number"] if lines else first
    problems = [f"number {line['number']}: {line['problem']}" for line in lines if "problem" in line]
    if not has_ended or reached < INPUTS // 2:
        problems.append(f"number {reached}: {'its process ended: ' + said if has_ended else 'it hangs'}")
        reached += 1
    return reached, problems


@pytest.mark.parametrize("seed", [0, None], ids=["fixed", "fresh"])
def test_wrong_inputs(seed: int | None, apart: Path) -> None:
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    train(tiny_run({"checkpoint": {"every_episodes": 1}}), output=apart / "done")
    number, failed = 0, []
    while number < INPUTS // 2:
        number, problems = report_of(apart, seed, number)
        failed += problems
    assert not failed, f"seed {seed}: {len(failed)} inputs; keep them in tests/soak/corpus:\n" + "\n\n".join(
        failed[:20]
    )


@pytest.mark.parametrize("file", CORPUS, ids=lambda path: path.name)
def test_what_once_failed(file: Path, apart: Path) -> None:
    """A run file; or what stands in the place of a prompts file, a reward or a model's file."""
    run, beside = apart / "run.yaml", apart / file.name
    beside.write_bytes(file.read_bytes())
    if file.suffix == ".yaml":
        beside.rename(run)
    else:
        prompts = {"name": "jsonl", "path": str(beside)}
        changes = {".jsonl": {"prompts": prompts, "rewards": ["length"]}, ".py": {"rewards": [f"{beside}:good"]}}
        run.write_text(json.dumps(tiny_run(changes[file.suffix])))
    for command in (["config", "check"], ["config", "show"], ["train", "--dry-run"]):
        assert try_command([*command, str(run)], apart) is None
