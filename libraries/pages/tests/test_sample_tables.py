"""Tables of samples for loggers: which answers of which episodes, read from the end of the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.hookspecs import Action
from rlhf_pages import SampleLogger, SampleTable, SampleTableOptions, read_sample_table, sample_tables
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots")


def sample(episode: int, number: int, **changes: Any) -> dict[str, Any]:
    return {
        "episode": episode,
        "prompt": f"prompt {number}",
        "completion": f"anführung {number}\n",
        "score": number / 4,
        "rewards": {"length": number, "match": 0.5},
        "num_tokens": number + 1,
        **changes,
    }


def write(path: Path, samples: list[dict[str, Any]], end: bytes = b"") -> Path:
    path.write_bytes(b"".join(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in samples) + end)
    return path


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 16])
def test_answers_are_spread_over_the_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(sample_tables, "_BLOCK_BYTES", block_bytes)
    samples = [sample(episode, number) for episode in range(3) for number in range(6)]
    path = write(tmp_path / "samples.jsonl", samples, end=b'{"episode": 2, "comp')  # a line that is being written
    table = read_sample_table(path, 1, 3)
    assert table == SampleTable(
        columns=["episode", "prompt", "completion", "reward", "reward/length", "reward/match", "length"],
        rows=[
            [1, "prompt 0", "anführung 0\n", 0.0, 0, 0.5, 1],
            [1, "prompt 2", "anführung 2\n", 0.5, 2, 0.5, 3],
            [1, "prompt 4", "anführung 4\n", 1.0, 4, 0.5, 5],
        ],
    )
    assert len(read_sample_table(path, 2, 100).rows) == 6
    assert len(read_sample_table(path, 0, 1).rows) == 1
    assert read_sample_table(path, 3, 1) is None


def test_missing_and_invalid_values_are_none(tmp_path: Path) -> None:
    records = [sample(0, 1, rewards={"length": 1.0}, score=None), sample(0, 2, rewards={"match": float("nan")})]
    table = read_sample_table(write(tmp_path / "samples.jsonl", [{"note": 1}, *records, {"episode": 0}]), 0, 8)
    assert table.columns[3:] == ["reward", "reward/length", "length"]
    assert [row[3:5] for row in table.rows] == [[None, 1.0], [0.5, None]]
    assert read_sample_table(tmp_path / "missing.jsonl", 0, 8) is None


class Recorder(SampleLogger):
    def __init__(self, run_folder: Path, **options: int) -> None:
        super().__init__(SampleTableOptions(**options), run_folder)
        self.steps: list[int] = []
        self.tables: list[tuple[int, SampleTable]] = []
        self.ended: list[bool] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert "step" not in values and values["reward/mean"] == 0.0
        self.steps.append(step)

    def log_samples(self, step: int, table: SampleTable) -> None:
        self.tables.append((step, table))

    def finish(self, failed: bool) -> None:
        self.ended.append(failed)


def run_with(logger: Recorder, folder: Path, **changes: Any) -> None:
    sizes = {"episodes": 4, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
    train(tiny_run({"train": sizes, **changes}), output=folder, hooks=[logger])


def test_a_run_logs_tables_of_the_first_of_every_n_and_of_the_last_episode(tmp_path: Path) -> None:
    logger = Recorder(tmp_path, samples=3, samples_every_episodes=2)
    run_with(logger, tmp_path)
    assert (logger.steps, logger.ended) == ([1, 2, 3, 4, 5, 6, 7, 8], [False])
    assert [(step, len(table.rows)) for step, table in logger.tables] == [(2, 3), (6, 3), (8, 3)]
    assert [table.rows[0][0] for _, table in logger.tables] == [0, 2, 3]
    assert logger.tables[0][1].columns[-3:] == ["reward", "reward/exact-match", "length"]


@pytest.mark.parametrize("changes", [{"logging": {"samples": "none"}}, {}], ids=["not written", "default"])
@pytest.mark.slow_except("default")
def test_no_texts_reach_a_logger_that_is_not_to_have_them(tmp_path: Path, changes: dict[str, Any]) -> None:
    logger = Recorder(tmp_path, **({"samples": 8} if changes else {}))
    run_with(logger, tmp_path, **changes)
    assert logger.steps and not logger.tables


class BackOnce:
    """Rolls back once, in the third episode."""

    may_roll_back = True
    is_over = False

    def rlhf_decide(self, moment: Any) -> Action | None:
        if self.is_over or moment.step != 6:
            return None
        self.is_over = True
        return Action(kind="rollback", by="BackOnce", reason="once", lr_factor=1.0)


@pytest.mark.slow
def test_a_rollback_logs_an_episode_again(tmp_path: Path) -> None:
    logger = Recorder(tmp_path, samples=8, samples_every_episodes=1)
    sizes = {"episodes": 3, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
    run = tiny_run({"train": sizes, "checkpoint": {"every_episodes": 1, "keep": 3}})
    train(run, output=tmp_path, hooks=[logger, BackOnce()])
    episodes = [table.rows[0][0] for _, table in logger.tables]
    assert sorted(set(episodes)) == [0, 1, 2] and len(episodes) > 3
