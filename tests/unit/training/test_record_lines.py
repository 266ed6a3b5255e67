"""`metrics.jsonl` has one line per update, each value on the lines it belongs to, also after a kill and a resume."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import CheckpointError, RlhfError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.place import LocalPlace
from rlhf_core.training.record import EpisodeRecord

PLACE = LocalPlace(torch.device("cpu"), torch.float32)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_episode(record: EpisodeRecord, episode: int, updates: int, *, evaluate: bool = False) -> None:
    record.start_episode(episode, episode, {"reward/mean": 0.5})
    for update in range(updates):
        record.update({"loss/policy": float(update)})
    record.evaluation({"time/train_s": 1.0})
    if evaluate:
        record.evaluation({"eval/score": 0.9})
    record.flush()


class Lines:
    """A hook plugin that keeps the lines."""

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def rlhf_metrics(self, line):
        self.seen.append(line)


def test_each_value_stands_on_its_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    hooks, kept = HookRelay(), Lines()
    hooks.register(kept)
    with EpisodeRecord(path, hooks) as writer:
        write_episode(writer, 0, 2, evaluate=True)
        write_episode(writer, 1, 1)
    seen = kept.seen
    assert lines(path) == seen
    assert [line["step"] for line in seen] == [1, 2, 3]
    assert [line["episode"] for line in seen] == [0, 0, 1]
    assert [line["policy_version"] for line in seen] == [0, 0, 1]
    assert all(line["reward/mean"] == 0.5 for line in seen)
    assert ["time/train_s" in line for line in seen] == [False, True, True]
    assert ["eval/score" in line for line in seen] == [False, True, False]


def test_a_line_is_on_disk_as_soon_as_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with EpisodeRecord(path) as writer:
        writer.start_episode(0, 0, {})
        writer.update({"loss/policy": 1.0, "rollout/logprob_gap_max": 1e-6})
        assert lines(path) == []
        writer.update({"loss/policy": 2.0})
        assert [line["step"] for line in lines(path)] == [1]
        writer.end_episode(PLACE)
        writer.flush(durable=True)
        assert [line["step"] for line in lines(path)] == [1, 2]
        assert all(line["rollout/logprob_gap_max"] == 1e-6 for line in lines(path))


def test_what_is_held_is_written_when_the_run_breaks_off(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RuntimeError), EpisodeRecord(path) as writer:
        writer.start_episode(0, 0, {})
        writer.update({"loss/policy": 1.0})
        raise RuntimeError
    assert [line["step"] for line in lines(path)] == [1]


def test_an_episode_without_an_update_has_no_line_for_its_evaluation(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with EpisodeRecord(path) as writer:
        writer.evaluation({"eval/score": 0.5})
    assert lines(path) == []


def test_not_finite_is_null_and_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with EpisodeRecord(path) as writer:
        writer.start_episode(0, None, {})
        writer.update({"loss/policy": math.nan, "loss/value": -math.inf, "kl/mean": 0.1})
    (line,) = lines(path)
    assert line["loss/policy"] is None and line["loss/value"] is None and line["kl/mean"] == 0.1
    assert line["nonfinite"] == {"loss/policy": "nan", "loss/value": "-inf"}
    assert "policy_version" not in line


@given(
    episodes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    checkpoint=st.integers(0, 5),
    torn=st.integers(0, 40),
)
def test_killed_and_resumed_gives_the_file_of_an_unbroken_run(tmp_path_factory, episodes, checkpoint, torn):
    checkpoint = min(checkpoint, len(episodes))
    folder: Path = tmp_path_factory.mktemp("run")
    whole, broken = folder / "whole.jsonl", folder / "broken.jsonl"
    for path in (whole, broken):
        with EpisodeRecord(path) as writer:
            for episode, updates in enumerate(episodes):
                write_episode(writer, episode, updates, evaluate=episode % 2 == 0)
    step = sum(episodes[:checkpoint])
    safe = sum(len(line) for line in whole.read_bytes().splitlines(keepends=True)[:step])
    content = broken.read_bytes()
    broken.write_bytes(content[: max(safe, len(content) - torn)])

    with EpisodeRecord(broken, step=step, count=step) as writer:
        for episode in range(checkpoint, len(episodes)):
            write_episode(writer, episode, episodes[episode], evaluate=episode % 2 == 0)
    assert broken.read_bytes() == whole.read_bytes()


def test_resume_refuses_a_file_that_lost_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with EpisodeRecord(path) as writer:
        write_episode(writer, 0, 2)
    with pytest.raises(CheckpointError, match=r"contains 2 lines .*counts 5"):
        EpisodeRecord(path, step=5, count=5)
    with EpisodeRecord(path, step=1, count=1):
        pass
    assert [line["step"] for line in lines(path)] == [1]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full_disk(handle: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.raises(RlhfError, match=r"(?s)metrics\.jsonl.*No space left.*--resume auto"),
        EpisodeRecord(tmp_path / "metrics.jsonl") as writer,
    ):
        writer.update({"loss/policy": 0.5})
        monkeypatch.setattr(os, "write", full_disk)
