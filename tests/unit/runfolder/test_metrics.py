from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import CheckpointError, RlhfError
from rlhf_core.runfolder.metrics import MetricsWriter, PhaseTimer


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_episode(writer: MetricsWriter, episode: int, updates: int, *, evaluate: bool = False) -> None:
    writer.start_episode(episode=episode, policy_version=episode, values={"reward/mean": 0.5})
    for update in range(updates):
        writer.update({"loss/policy": float(update)})
    writer.add_to_last({"time/train_s": 1.0})
    if evaluate:
        writer.add_to_last({"eval/score": 0.9})
    writer.flush()


def test_each_value_stands_on_its_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    seen: list[dict] = []
    with MetricsWriter(path, on_line=seen.append) as writer:
        write_episode(writer, 0, 2, evaluate=True)
        write_episode(writer, 1, 1)
    assert lines(path) == seen
    assert [line["step"] for line in seen] == [1, 2, 3]
    assert [line["episode"] for line in seen] == [0, 0, 1]
    assert [line["policy_version"] for line in seen] == [0, 0, 1]
    assert all(line["reward/mean"] == 0.5 for line in seen)
    assert ["time/train_s" in line for line in seen] == [False, True, True]
    assert ["eval/score" in line for line in seen] == [False, True, False]


def test_a_line_is_on_disk_as_soon_as_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.start_episode(episode=0, policy_version=0, values={})
    writer.add_episode_values({"rollout/logprob_gap_max": 1e-6})
    writer.update({"loss/policy": 1.0})
    assert lines(path) == []
    writer.update({"loss/policy": 2.0})
    assert [line["step"] for line in lines(path)] == [1]
    writer.add_to_last({})
    writer.flush(sync=True)
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert all(line["rollout/logprob_gap_max"] == 1e-6 for line in lines(path))
    writer.close()
    writer.close()


def test_what_is_held_is_written_when_the_run_breaks_off(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RuntimeError), MetricsWriter(path) as writer:
        writer.start_episode(episode=0, policy_version=0, values={})
        writer.update({"loss/policy": 1.0})
        raise RuntimeError
    assert [line["step"] for line in lines(path)] == [1]


def test_an_episode_without_an_update_has_no_line_for_its_evaluation(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.add_to_last({"eval/score": 0.5})
    assert lines(path) == []


def test_not_finite_is_null_and_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.start_episode(episode=0, policy_version=None, values={})
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
        with MetricsWriter(path) as writer:
            for episode, updates in enumerate(episodes):
                write_episode(writer, episode, updates, evaluate=episode % 2 == 0)
    step = sum(episodes[:checkpoint])
    safe = sum(len(line) for line in whole.read_bytes().splitlines(keepends=True)[:step])
    content = broken.read_bytes()
    broken.write_bytes(content[: max(safe, len(content) - torn)])

    with MetricsWriter(broken, step=step, count=step) as writer:
        for episode in range(checkpoint, len(episodes)):
            write_episode(writer, episode, episodes[episode], evaluate=episode % 2 == 0)
    assert broken.read_bytes() == whole.read_bytes()


def test_resume_refuses_a_file_that_lost_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        write_episode(writer, 0, 2)
    with pytest.raises(CheckpointError, match=r"holds 2 lines .*counts 5"):
        MetricsWriter(path, step=5, count=5)
    MetricsWriter(path, step=1, count=1).close()
    assert [line["step"] for line in lines(path)] == [1]


def test_phases_are_exclusive_and_start_anew(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 1.0, 4.0, 6.0, 10.0, 12.0])
    monkeypatch.setattr("rlhf_core.runfolder.metrics.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = PhaseTimer()
    with timer.phase("rollout"), timer.phase("reward"):  # 0 .. 6, of which 1 .. 4 is the reward's
        pass
    with timer.phase("train"):  # 10 .. 12
        pass
    timer.add("train", 0.5)
    assert timer.seconds("rollout") == 3.0
    assert timer.take() == {"time/rollout_s": 3.0, "time/reward_s": 3.0, "time/train_s": 2.5}
    assert timer.take() == {}
    assert next(clock, None) is None


def test_an_open_phase_cannot_be_taken():
    timer = PhaseTimer()
    with timer.phase("train"), pytest.raises(RuntimeError, match="train"):
        timer.take()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full_disk(handle: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.update({"loss/policy": 0.5})
    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(RlhfError, match=r"(?s)metrics\.jsonl.*No space left.*--resume auto"):
        writer.close()
