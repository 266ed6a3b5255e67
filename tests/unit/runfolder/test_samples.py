from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import RlhfError
from rlhf_core.runfolder.lines import RunLines
from rlhf_core.runfolder.samples import choose, sample_line
from rlhf_core.types import Rollout
from rlhf_core.util import jsonl


def record(sample_id: int, episode: int = 0) -> dict[str, Any]:
    rollout = Rollout(
        sample_id=sample_id,
        prompt="2 1 ä",
        messages=None,
        prompt_ids=(1, 2),
        completion="1 2\n\ud800",
        completion_ids=(3, 4, 5),
        logprobs=(-0.1, -0.2, -0.3),
        answer=None,
        metadata={},
        policy_version=episode,
        finish_reason="stop",
    )
    return sample_line(rollout, episode=episode, rewards={"exact-match": 1.0}, score=1.0)


def open_samples(path: Path, episode: int = -1) -> RunLines:
    return RunLines(path, "episode", episode, instead="--set logging.samples=none")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().decode("utf-8", "surrogatepass").splitlines()]


def test_one_line_per_sample_with_its_fields(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    with open_samples(path) as writer:
        writer.append([record(4), record(5)])
        writer.sync()
        first = read(path)
    assert [line["sample_id"] for line in first] == [4, 5]
    assert first[0] == {
        "sample_id": 4,
        "episode": 0,
        "policy_version": 0,
        "prompt": "2 1 ä",
        "completion": "1 2\n\ud800",
        "rewards": {"exact-match": 1.0},
        "score": 1.0,
        "finish_reason": "stop",
        "num_tokens": 3,
    }


@pytest.mark.parametrize(("keep", "ids"), [("all", [0, 1, 2, 3, 4]), ("none", []), (2, [0, 2]), (9, [0, 1, 2, 3, 4])])
def test_how_many_are_kept(keep, ids):
    assert list(choose(range(5), keep)) == ids


def test_resume_cuts_by_episode_and_a_torn_line(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    with open_samples(path) as writer:
        for episode in range(3):
            writer.append([record(10 * episode + index, episode) for index in range(2)])
    path.write_bytes(path.read_bytes()[:-5])
    with open_samples(path, episode=1) as writer:
        writer.append([record(20, 2), record(21, 2)])
    assert [line["sample_id"] for line in read(path)] == [0, 1, 10, 11, 20, 21]
    open_samples(path, episode=-1).close()
    assert path.read_bytes() == b""


def test_a_torn_line_among_the_samples_of_the_checkpoint_is_named(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    with open_samples(path) as writer:
        for episode in range(3):
            writer.append([record(10 * episode + index, episode) for index in range(2)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(RlhfError, match=r"samples\.jsonl:2: "):
        open_samples(path, episode=1)
    assert path.read_bytes() == b"".join([lines[0], lines[1][:20], *lines[2:]])


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with open_samples(tmp_path / "samples.jsonl") as writer:
        writer.append([record(0)])
        monkeypatch.setattr(os, "write", full_disk)
        with pytest.raises(RlhfError, match=r"No space left.*\n.*logging\.samples"):
            writer.append([record(index) for index in range(1000)])
    assert [line["sample_id"] for line in read(tmp_path / "samples.jsonl")] == [0] and writer.num_lines == 1


def full_disk(handle: int, content: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_memory_that_runs_out_is_reported(tmp_path: Path, monkeypatch):
    def fail(line):
        raise MemoryError

    with open_samples(tmp_path / "samples.jsonl") as writer:
        monkeypatch.setattr(jsonl, "_line", fail)
        with pytest.raises(RlhfError, match="samples cannot be written: MemoryError"):
            writer.append([record(0)])


def test_choose_is_the_same_each_time():
    assert choose(range(100), 4) == [0, 25, 50, 75]
