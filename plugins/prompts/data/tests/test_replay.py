"""`player: {replay: RUN}`: the recorded tokens of a run are trained on, and what cannot be replayed is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_data.replay import RecordedSamples
from rlhf_testing.runs import tiny_run

TIMED = ("time/", "tokens_per_second/", "memory/", "reward_calls/")
LENGTH = [{"name": "length", "target_tokens": 2}]


def run_file(**changes: Any) -> dict[str, Any]:
    recorded = {"tensorboard": False, "sample_tokens": True}
    base = {"algorithm": {"name": "grpo"}, "rewards": LENGTH, "logging": recorded}
    return tiny_run({**base, "checkpoint": {"every_episodes": 1}, **changes})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "run"
    train(run_file(), output=folder)
    return folder


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Callable[[Callable[[list[str]], list[str]]], Path]:
    """A copy of the run whose samples were edited, as lines with their newlines."""

    def make(edit: Callable[[list[str]], list[str]]) -> Path:
        folder = tmp_path / "copy"
        folder.mkdir()
        for name in ("config.yaml", "manifest.json"):
            (folder / name).write_bytes((original / name).read_bytes())
        lines = (original / "samples.jsonl").read_text().splitlines(keepends=True)
        (folder / "samples.jsonl").write_text("".join(edit(lines)))
        return folder

    return make


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in found]


@pytest.mark.parametrize("strategy", ["single", "torch-ddp"])
def test_a_replay_makes_the_same_updates(strategy: str, original: Path, tmp_path: Path) -> None:
    """The weights are the same at each update, so that all updates are those of the original run."""
    run = run_file(player={"replay": str(original)}, strategy={"name": strategy})
    train(run, output=tmp_path / "run")
    replayed, recorded = lines(tmp_path / "run"), lines(original)
    assert len(replayed) == len(recorded) == 4
    for ours, theirs in zip(replayed, recorded, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert lines(tmp_path / "run", "samples.jsonl") == lines(original, "samples.jsonl")


def test_the_log_probs_are_those_of_the_policy_that_sampled(original: Path, tmp_path: Path) -> None:
    """A larger learning rate leads the weights away from the recorded ones, whose log-probs stay."""
    run = run_file(player={"replay": str(original)}, optimizer={"lr": 1e-2})
    train(run, output=tmp_path / "run")
    first, *_, last = lines(tmp_path / "run")
    assert first["rollout/logprob_gap_max"] < 1e-4
    gaps = [line["rollout/logprob_gap_max"] for line in lines(tmp_path / "run") if "rollout/logprob_gap_max" in line]
    assert last["policy/ratio_mean"] != pytest.approx(1.0, abs=1e-3) and max(gaps) > 1e-2
    recorded, ours = (
        [(line["sample_id"], line["logprobs"]) for line in lines(each, "samples.jsonl")]
        for each in (original, tmp_path / "run")
    )
    assert recorded == ours


def test_later_episodes_may_be_sampled(original: Path, tmp_path: Path) -> None:
    sizes = {"episodes": 3, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
    train(run_file(player={"replay": str(original), "episodes": 1}, train=sizes), output=tmp_path / "run")
    ours, recorded = lines(tmp_path / "run", "samples.jsonl"), lines(original, "samples.jsonl")
    assert ours[:16] == recorded, "the same weights sample the same second episode"
    assert len(ours) == 24


def test_a_resumed_replay_continues(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes: dict[str, Any] = {"player": {"replay": str(original)}}
    sizes = {"prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
    train(run_file(**changes, train={"episodes": 1, **sizes}), output=folder)
    train(run_file(**changes, train={"episodes": 2, **sizes}), output=folder, resume="auto")
    for ours, theirs in zip(lines(folder), lines(original), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def changed(number: int, **values: Any) -> Callable[[list[str]], list[str]]:
    """An edit of the values of one line. None removes a key."""

    def edit(text: list[str]) -> list[str]:
        record = {**json.loads(text[number]), **values}
        kept = {key: value for key, value in record.items() if value is not None}
        return [*text[:number], json.dumps(kept) + "\n", *text[number + 1 :]]

    return edit


EDITS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "torn": (lambda text: [*text[:-1], text[-1][:40]], r"samples\.jsonl:16: is torn"),
    "missing": (lambda text: text[:9] + text[10:], r"lacks sample 9: 1 of the 16 samples"),
    "repeated": (lambda text: [*text, text[3]], r"samples\.jsonl:17: repeats sample 3"),
    "not JSON": (lambda text: ["{\n", *text[1:]], r"samples\.jsonl:1: is not a JSON object"),
    "without log-probs": (changed(0, logprobs=None), r"samples\.jsonl:1: lacks logprobs"),
    "other text": (changed(2, completion="99"), r"sample 2: its tokens are not those of its text"),
    "other prompt": (changed(2, prompt_ids=[5, 6]), r"sample 2: its prompt is not the one of this run"),
    "other lengths": (changed(2, logprobs=[-1.0]), r"samples\.jsonl:3: is not a sample of a single answer"),
    "not a number": (changed(2, logprobs="1"), r"samples\.jsonl:3: is not a sample of a single answer"),
    "no mask": (changed(2, action_mask=1), r"samples\.jsonl:3: is not a sample of a single answer"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_damaged_recordings_are_named(edit: str, copied: Any, tmp_path: Path) -> None:
    change, message = EDITS[edit]
    folder = copied(change)
    with pytest.raises(RlhfError, match=message):
        train(run_file(player={"replay": str(folder)}), output=tmp_path / "run")


def test_a_file_that_changes_during_the_replay_is_named(copied: Any) -> None:
    samples = RecordedSamples(copied(lambda text: text) / "samples.jsonl")
    assert samples.answer(3).policy_version == 0
    with samples.path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="has changed while it was replayed"):
        samples.answer(4)
    samples.path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        samples.answer(4)


@pytest.mark.parametrize("values", [{"logprobs": [10**400]}, {"logprobs": [math.nan]}, {"completion_ids": [True]}])
def test_numbers_that_cannot_be_are_named(values: dict[str, Any], tmp_path: Path) -> None:
    line = {"sample_id": 0, "prompt_ids": [5], "completion_ids": [6], "logprobs": [-1.0], "action_mask": [True]}
    line |= {"completion": "1", "finish_reason": "stop", "policy_version": 0}
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert RecordedSamples(path).answer(0).logprobs == (-1.0,)
    path.write_text(json.dumps({**line, **values}) + "\n")
    with pytest.raises(DataError, match=r"samples\.jsonl:1: is not a sample of a single answer"):
        RecordedSamples(path).answer(0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another temperature": ({"engine": {"temperature": 0.5}}, r"set engine\.temperature to 1\.0"),
    "an environment": ({"environment": {"name": "guess-number"}}, "replays single answers"),
    "options of prompts": (
        {"prompts": {"sampling": {"temperature": "heat"}}},
        r"player\.replay: prompts\.sampling sets",
    ),
    "a dataset": ({"algorithm": {"name": "sft"}, "rewards": []}, "sft learns from a dataset"),
    "greedy answers": ({"algorithm": {"name": "reinforce++", "advantage": "remax"}}, "greedy answers"),
    "more episodes": ({"train": {"episodes": 3}}, "lacks sample 16: 8 of the 24 samples"),
}


@pytest.mark.parametrize("pair", REFUSED)
def test_what_cannot_be_replayed_is_refused(pair: str, original: Path, tmp_path: Path) -> None:
    changes, message = REFUSED[pair]
    with pytest.raises(RlhfError, match=message) as error:
        train(run_file(player={"replay": str(original)}, **changes), output=tmp_path / "run", dry_run=True)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"top_k": 3}}, "sampled with top_k: 3, whose distribution is not recorded"),
        ({"logging": {"tensorboard": False}}, "did not record tokens"),
    ],
)
def test_runs_that_did_not_record_enough_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    train(run_file(**changes), output=tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        train(run_file(player={"replay": str(tmp_path / "run")}), dry_run=True)
    with pytest.raises(ConfigError, match=r"player\.replay: .*does not contain a run"):
        train(run_file(player={"replay": str(tmp_path)}), dry_run=True)
