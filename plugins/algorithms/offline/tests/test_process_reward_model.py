"""Scores at the ends of steps against single prefixes, lines that are none, and a run whose model tells steps apart."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core import train
from rlhf_core.errors import ConfigError, DataError
from rlhf_models.classifier import as_score_model
from rlhf_testing.models import tiny_model, tiny_tokenizer
from rlhf_testing.runs import tiny_run

RECORDS = [
    {"prompt": "31>", "steps": ["1", "33"], "labels": [True, False]},
    {"prompt": "542>", "steps": ["2", "4", "5"], "labels": [True, True, True]},
]


@pytest.mark.parametrize("separator", [",", ""])
def test_the_loss_is_that_of_each_prefix_alone(algorithm: Any, separator: str) -> None:
    tokenizer = tiny_tokenizer()
    made = algorithm("process-reward-model", {"step_separator": separator}, tokenizer)
    model = as_score_model(tiny_model(seed=1), tokenizer)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    batch = made.collate([made.encode(record, tokenizer) for record in RECORDS])
    output = made.loss({"policy": model}, batch)
    total, right, wrong_found = 0.0, 0, 0
    for record in RECORDS:
        text = str(record["prompt"])
        for step, label in zip(record["steps"], record["labels"], strict=True):
            text += str(step) + separator
            with torch.no_grad():
                score = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits.item()
            total += math.log1p(math.exp(-score if label else score))
            right += (score > 0) == label
            wrong_found += score <= 0 and not label
    assert output.sums["policy"].item() == pytest.approx(total, rel=1e-5)
    assert made.counts(batch) == {"policy": 5.0}
    assert int(output.metrics["step/accuracy"].total) == right
    assert int(output.metrics["step/wrong_found"].total) == wrong_found
    assert int(output.metrics["step/wrong_found"].count) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": None},
        {"steps": []},
        {"steps": "12"},
        {"steps": [1, 2]},
        {"labels": [True]},
        {"labels": [1, 0]},
        {"labels": None},
    ],
)
def test_lines_without_labelled_steps(algorithm: Any, changes: dict[str, Any]) -> None:
    made = algorithm("process-reward-model")
    with pytest.raises(DataError, match="`steps` .* and `labels`"):
        made.encode({**RECORDS[0], **changes}, tiny_tokenizer())


def test_an_empty_step_and_a_long_line(algorithm: Any) -> None:
    made = algorithm("process-reward-model", {"step_separator": "", "max_tokens": 6})
    with pytest.raises(DataError, match="a step of the record is empty"):
        made.encode({**RECORDS[0], "steps": ["1", ""]}, tiny_tokenizer())
    assert made.encode({**RECORDS[0], "steps": ["1", "3333333"]}, tiny_tokenizer()) is None


def stepped_lines(path: Path) -> Path:
    """Numbers of three digits, sorted digit by digit; every other one has a wrong digit, and is wrong from there."""
    draw, lines = random.Random(0), []
    for number in range(500):
        digits = [draw.choice("0123456789") for _ in range(3)]
        steps, wrong = sorted(digits), draw.randrange(3) if number % 2 else 3
        if wrong < 3:
            steps[wrong] = str((int(steps[wrong]) + 5) % 10)
        labels = [place < wrong for place in range(3)]
        lines.append(json.dumps({"prompt": "".join(digits) + ">", "steps": steps, "labels": labels}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
@pytest.mark.slow
def test_it_is_learnt_and_read_by_the_reward(tmp_path: Path, lora: Any) -> None:
    run = {
        "model": {"path": "builtin:tiny-digits", "device": "cpu", "lora": lora},
        "prompts": {"name": "jsonl", "path": str(stepped_lines(tmp_path / "steps.jsonl"))},
        "eval": {"every_episodes": 15, "num_prompts": 50},
        "algorithm": {"name": "process-reward-model", "step_separator": ""},
        "optimizer": {"lr": 3e-3},
        "train": {"episodes": 15, "prompts_per_episode": 64, "train_batch_size": 32},
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
    }
    result = train(run, output=tmp_path / "run")
    assert result is not None
    last = result.metrics[-1]
    assert last["loss/policy"] < result.metrics[0]["loss/policy"] == pytest.approx(math.log(2), abs=1e-3)
    assert last["eval/step/accuracy"] >= last["eval/step/right_fraction"]
    entry = {"name": "model", "path": str(tmp_path / "run" / "model"), "steps": "product", "step_separator": ""}
    judged = train(tiny_run({"rewards": [entry], "eval": None}), output=tmp_path / "judged")
    assert judged is not None and 0 < judged.metrics[-1]["reward/model"] < 1


def test_it_gives_scores_and_has_no_rewards() -> None:
    with pytest.raises(ConfigError, match="process-reward-model trains a model that returns scores"):
        train(tiny_run({"algorithm": {"name": "process-reward-model"}}), dry_run=True)
