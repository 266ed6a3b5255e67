"""Faults around a journal: damaged lines, a full disk, steps that are sent twice, episodes that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from interrupted import Counts, Engine, Keeps, attempt, journal, made, same
from playing import player

from rlhf_episodes.progress import RESET, Step
from rlhf_testing.samples import make_prompt

UNDISTURBED = {kind: same(attempt(made(kind)[0], None, Engine())) for kind in (Counts, Keeps)}


def test_a_step_is_recorded_once(tmp_path: Path) -> None:
    """A child process may send it any number of times."""
    engine = Engine()
    lines, found = journal(tmp_path, engine)
    found.begin()
    found.open(make_prompt(0), 0)
    progress = found.progress(0)
    assert progress.record is not None
    for _ in range(100):
        progress.record(Step(turn=RESET, observation=None, state=1))
    progress.took_turn(0, (3,), 0)
    for size in (200_000, 1, 1, 1):
        progress.record(Step(turn=0, observation=None, state="x" * size))
    lines.close()
    (path,) = tmp_path.iterdir()
    assert len(path.read_text().splitlines()) == 1 + 2


class Fails(Counts):
    def step(self, reply: Any) -> Any:
        super().step(reply)
        raise OSError("the machine goes down")


def test_failed_episodes_are_played_again(tmp_path: Path) -> None:
    make, calls = made(Fails)
    for _ in range(2):
        attempt(make, tmp_path, Engine(), on_failure="zero")
    assert calls.count("step") == 6


def test_damaged_lines_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, _ = made(Keeps)
    attempt(make, tmp_path, Engine(8))
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_text().splitlines()
    for number, text in ((4, '{"at": 3}'), (6, '{"at": [0, 0], "sample": 1, "turn": "x", "completion": 5}')):
        damaged = [*lines[:number], text, *lines[number:]]
        path.write_text("\n".join(damaged) + "\n")
        engine = Engine()
        assert same(attempt(make, tmp_path / "none", engine)) == UNDISTURBED[Keeps]
        assert same(attempt(make, tmp_path, Engine())) == UNDISTURBED[Keeps]
        for other in set(tmp_path.glob("*.jsonl")) - {path}:
            other.unlink()
    assert "so its turns are sampled again" in caplog.text


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, _ = made(Keeps)
    engine = Engine()
    found = player(make, engine=engine, max_new_tokens=3)
    lines, found.journal = journal(tmp_path / "journal", engine)
    (tmp_path / "journal").write_text("not a folder")
    assert len(list(found.play([(make_prompt(0), number) for number in range(3)]))) == 3
    assert caplog.text.count("turns are no longer recorded") == 1
    lines.close()
