"""Whole runs from data files: the loss falls, held-out records are measured, the saved model is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_core import train
from rlhf_core.errors import ConfigError, DataError


def evaluations(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in metrics if name in line]


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_tokens": 40}], ids=["padded", "packed"])
def test_sft(run_file: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    result = train(run_file({"name": "sft", **options}), output=tmp_path / "run")
    assert result is not None
    losses = evaluations(result.metrics, "eval/loss/policy")
    assert len(losses) == 2, "after episodes 2 and 4"
    assert losses[1] < losses[0]
    assert 0 < evaluations(result.metrics, "eval/sft/token_accuracy")[-1] <= 1


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
@pytest.mark.slow_except("full")
def test_dpo(run_file: Any, tmp_path: Path, lora: Any) -> None:
    run = run_file({"name": "dpo"}, model={"path": "builtin:tiny-digits", "device": "cpu", "lora": lora})
    result = train(run, output=tmp_path / "run")
    assert result is not None
    assert result.metrics[0]["loss/policy"] == pytest.approx(0.6931, abs=1e-3), "at the reference"
    assert result.metrics[-1]["loss/policy"] < 0.68
    assert evaluations(result.metrics, "eval/preference/accuracy")[-1] > 0.9
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
@pytest.mark.slow
def test_a_reward_model_is_a_classifier_that_ranks_held_out_pairs(
    run_file: Any, lines: Path, tmp_path: Path, lora: Any
) -> None:
    sizes = {"episodes": 12, "prompts_per_episode": 60, "train_batch_size": 30}
    run = run_file(
        {"name": "reward-model", "centring_coef": 0.01},
        model={"path": "builtin:tiny-digits", "device": "cpu", "lora": lora},
        optimizer={"lr": 2e-3},
        train=sizes,
    )
    result = train(run, output=tmp_path / "run")
    assert result is not None
    assert evaluations(result.metrics, "eval/preference/accuracy")[-1] >= 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    records = [json.loads(line) for line in lines.read_text().splitlines()]

    def scores(key: str) -> torch.Tensor:
        texts = [record["prompt"] + record[key] + tokenizer.eos_token for record in records]
        encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
            return model(**inputs).logits.squeeze(-1)

    assert float((scores("chosen") > scores("rejected")).float().mean()) >= 0.9, "read by plain transformers"
    again = run_file({"name": "reward-model"}, model={"path": str(tmp_path / "run" / "model"), "device": "cpu"})
    again["train"] = {**sizes, "episodes": 1}
    more = train(again, output=tmp_path / "again")
    assert more is not None and more.metrics[0]["preference/accuracy"] >= 0.9, "training goes on from its own head"


def test_records_held_out_in_a_file_of_their_own_are_measured(run_file: Any, lines: Path, tmp_path: Path) -> None:
    """Their pairs are the other way round, so that what is learnt makes every one of them wrong."""
    turned = [json.loads(line) for line in lines.read_text().splitlines()[:30]]
    own = tmp_path / "held-out.jsonl"
    own.write_text(
        "".join(json.dumps(row | {"chosen": row["rejected"], "rejected": row["chosen"]}) + "\n" for row in turned)
    )
    held_out = {"prompts": {"name": "jsonl", "path": str(own)}, "every_episodes": 4}
    result = train(run_file({"name": "dpo"}, eval=held_out), output=tmp_path / "run")
    assert result is not None
    assert evaluations(result.metrics, "eval/preference/accuracy")[-1] < 0.1
    own.write_text(json.dumps({"prompt": "21>", "chosen": "12"}) + "\n")
    with pytest.raises(DataError, match="rejected"):
        train(run_file({"name": "dpo"}, eval=held_out), output=tmp_path / "again")


@pytest.mark.slow
def test_dpo_resumes_exactly(run_file: Any, tmp_path: Path) -> None:
    """The reference is the start policy, also after a resume."""
    run = run_file({"name": "dpo"}, checkpoint={"every_episodes": 2, "keep": 5})
    whole = train(run, output=tmp_path / "whole")
    train({**run, "train": {**run["train"], "episodes": 2}}, output=tmp_path / "half")
    rest = train(run, output=tmp_path / "half", resume="auto")
    assert whole is not None and rest is not None
    for ours, expected in zip(rest.metrics, whole.metrics, strict=True):
        assert ours["loss/policy"] == pytest.approx(expected["loss/policy"], rel=1e-6)


def test_preference_data_without_rejected_is_found_before_anything_runs(run_file: Any, tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"prompt": "1>", "chosen": "1"}\n' * 80)
    for name in ("dpo", "reward-model"):
        run = run_file({"name": name}, prompts={"name": "jsonl", "path": str(path)})
        with pytest.raises(DataError, match="`rejected` must be text"):
            train(run, output=tmp_path / "run", dry_run=True)


def test_a_reward_model_writes_no_answers_to_reward(run_file: Any) -> None:
    with pytest.raises(ConfigError, match="rewards: reward-model trains a model that returns scores"):
        train(run_file({"name": "reward-model"}, rewards=[{"name": "exact-match"}]), dry_run=True)


def test_smoothing_is_for_one_loss(run_file: Any) -> None:
    with pytest.raises(ConfigError, match="label_smoothing requires loss sigmoid or robust, not ipo"):
        train(run_file({"name": "dpo", "loss": "ipo", "label_smoothing": 0.1}), dry_run=True)
