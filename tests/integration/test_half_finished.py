"""A run that ends in the middle of ten-turn episodes continues from the last finished turn."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_files import metrics, samples
from running import Forked, ended

from rlhf_core import train
from rlhf_core.errors import EpisodeError
from rlhf_core.runfolder import find_complete_checkpoint
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")
GAMES = Path(__file__).with_name("ten_turns.py")
NUM_STEPS = 4 * 2 * 10
"""Steps of the environment in an iteration: prompts, samples of each, turns."""


def run_of(kind: str, **options: Any) -> dict[str, Any]:
    return tiny_run(
        {
            "environment": {"name": f"{GAMES}:{kind}", "max_turns": 10, **options},
            "prompts": None,
            "rewards": None,
            "engine": {"max_new_tokens": 3},
            "algorithm": {"name": "grpo"},
            "train": {"episodes": 3, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 8},
            "checkpoint": {"every_episodes": 2},
            "logging": {"sample_tokens": True},
        }
    )


def turns_of(folder: Path) -> Counter[str]:
    """Turns in the journal of a run, by weights, sample and request."""
    found: Counter[str] = Counter()
    for path in (folder / "journal" / "environment" / "train").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            if "turn" in line:
                found[json.dumps([line["at"], line["sample"], line["turn"]])] += 1
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(run_of("Remembers"), output=folder)
    return folder


def close_to(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert set(ours) >= set(theirs)  # Ray has further metrics
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def ids(folder: Path) -> list[Any]:
    return [(each["sample_id"], each["completion_ids"], each["action_mask"]) for each in samples(folder)]


def check(run: Path, undisturbed: Path) -> None:
    close_to(metrics(run), metrics(undisturbed))
    assert ids(run) == ids(undisturbed)
    turns = turns_of(run)
    assert turns and max(turns.values()) == 1, "a finished turn was sampled again"


@pytest.mark.parametrize("kind", ["Remembers", "Ten"])
@pytest.mark.parametrize("after", [NUM_STEPS // 2 + 3, NUM_STEPS * 5 // 2])
@pytest.mark.slow_except("43-Remembers")
def test_a_failed_run_continues(
    kind: str, after: int, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends").touch()
    ends = {"ends_at": str(tmp_path / "ends"), "after": after, "kills": False}
    run = run_of(kind, **ends)
    with pytest.raises(EpisodeError, match="ended by the test"):
        train(run, output=tmp_path / "run")
    complete = find_complete_checkpoint(tmp_path / "run")
    assert (complete is None) == (after < NUM_STEPS)
    train(run, output=tmp_path / "run", resume="auto", restart=complete is None)
    check(tmp_path / "run", undisturbed)


def play(run: dict[str, Any], folder: Path, ends: Path | None, options: dict[str, Any]) -> None:
    """Train in this process. `ends`: a file that names it, so that another process can kill it."""
    if ends is not None:
        ends.write_text(str(os.getpid()))
    train(run, output=folder, **options)


def forked(run: dict[str, Any], folder: Path, ends: Path | None = None, **options: Any) -> int | None:
    process = Forked(play, run, folder, ends, options)
    with ended(process):
        print(*process.finish())
        return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("after", [3, NUM_STEPS // 2, NUM_STEPS - 1, NUM_STEPS * 2 + 41, NUM_STEPS * 3 - 1])
def test_a_killed_run_continues(after: int, undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "ends").touch()
    run = run_of("Remembers", ends_at=str(tmp_path / "ends"), after=after)
    assert forked(run, tmp_path / "run") == -signal.SIGKILL
    assert not (tmp_path / "ends").exists()
    complete = find_complete_checkpoint(tmp_path / "run")
    train(run, output=tmp_path / "run", resume="auto", restart=complete is None)
    check(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["maker", "run"])
def test_killed_makers_and_runs_on_ray_continue(killed: str, undisturbed: Path, tmp_path: Path) -> None:
    pytest.importorskip("rlhf_ray", reason="the transport ray is not installed")
    (tmp_path / "ends").touch()
    run = run_of("Remembers", ends_at=str(tmp_path / "ends"), after=NUM_STEPS * 2 + 41)
    run |= {"transport": {"name": "ray", "max_staleness": 0}}
    returned = forked(run, tmp_path / "run", tmp_path / "ends" if killed == "run" else None)
    assert not (tmp_path / "ends").exists()
    if killed == "run":
        assert returned == -signal.SIGKILL
        assert forked(run, tmp_path / "run", resume="auto") == 0
    else:
        assert returned == 0 and "is restarted" in (tmp_path / "run" / "run.log").read_text()
    check(tmp_path / "run", undisturbed)
