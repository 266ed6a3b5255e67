"""The section `prompts.sampling`: each prompt's own temperature and other request options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.errors import ConfigError, DataError
from rlhf_testing.runs import tiny_run

TRAIN = {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 8}


def run_with(records: list[dict[str, Any]], folder: Path, **changes: Any) -> dict[str, Any]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    keys = {"temperature": "heat", "repetition_penalty": "repeat"}
    return tiny_run(
        {
            "algorithm": {"name": "grpo", "kl_coef": 0},
            "prompts": {"name": "jsonl", "path": str(path), "sampling": keys},
            "engine": {"max_new_tokens": 6},
            "rewards": ["length"],
            "train": TRAIN,
            **changes,
        }
    )


def test_answers_follow_the_temperature_of_their_prompt(tmp_path: Path) -> None:
    """At a temperature near 0 both answers to a prompt are equal, and the trainer agrees with the engine."""
    records = [
        {"prompt": str(10 + i), **([{}, {"heat": 1e-3}, {"heat": 1.5, "repeat": 1.2}][i % 3])} for i in range(12)
    ]
    result = train(run_with(records, tmp_path), output=tmp_path / "run")
    assert result is not None
    assert all(line["rollout/logprob_gap_max"] < 1e-3 for line in result.metrics)
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    heat = {each["prompt"]: each.get("heat") for each in records}
    cold: dict[str, set[str]] = {}
    warm: dict[str, set[str]] = {}
    for line in lines:
        (cold if heat[line["prompt"]] == 1e-3 else warm).setdefault(line["prompt"], set()).add(line["completion"])
    assert cold and all(len(answers) == 1 for answers in cold.values())
    assert any(len(answers) == 2 for answers in warm.values())


def test_a_value_that_is_not_a_number_names_the_prompt(tmp_path: Path) -> None:
    run = run_with([{"prompt": "12", "heat": "hot"}] * 8, tmp_path)
    with pytest.raises(DataError, match=r"prompt \d+, key heat: the temperature is 'hot'"):
        train(run, output=tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "guess-number"}, r"prompts\.sampling: an environment makes its own requests"),
        (
            {"engine": {"name": "http", "url": "http://localhost:1"}},
            r"prompts\.sampling\.temperature: the engine http does not accept this request option",
        ),
        ({"algorithm": {"name": "sft"}}, r"prompts\.sampling: sft does not sample answers"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    records = [{"prompt": "12", "completion": "1", "answer": "1"}] * 8
    with pytest.raises(ConfigError, match=message):
        train(run_with(records, tmp_path, **changes), dry_run=True)
