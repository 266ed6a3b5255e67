"""Whole runs in this process: each algorithm learns, and its metrics are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_testing.runs import tiny_run

SHORT = {"name": "length", "target_tokens": 1, "shape": "at-most"}


def start(options: dict[str, Any], folder: Path, **changes: Any) -> list[dict[str, Any]]:
    run = tiny_run(
        {
            "algorithm": options,
            "rewards": [SHORT],
            "engine": {"max_new_tokens": 8},
            "optimizer": {"lr": 3e-3},
            "train": {"episodes": 4, "prompts_per_episode": 8, "samples_per_prompt": 4, "train_batch_size": 16},
            **changes,
        }
    )
    result = train(run, output=folder / "run")
    assert result is not None and result.summary["status"] == "done"
    return result.metrics


@pytest.mark.parametrize(
    "options",
    [
        {"name": "grpo"},
        {"name": "grpo", "policy_loss": "gspo", "divide_by_std": False, "aggregation": "sequence-mean-token-sum-norm"},
        {"name": "grpo", "policy_loss": "cispo", "kl_coef": 0, "importance_cap": 2.0, "mask_truncated": False},
        {"name": "rloo"},
        {"name": "reinforce++"},
        {"name": "reinforce++", "baseline": "group", "kl_in": "loss", "kl_estimator": "k2"},
        {"name": "rejection-sampling"},
        {"name": "online-dpo", "kl_coef": 0.01},
        {"name": "grpo", "preference": {"coef": 0.1}, "imitation": {"coef": 0.1, "best": 2}},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
@pytest.mark.slow_except("grpo", "rloo", "reinforce++", "rejection-sampling", "online-dpo-0.01")
def test_shorter_answers_are_learnt(options: dict[str, Any], tmp_path: Path) -> None:
    metrics = start(options, tmp_path)
    assert len(metrics) == 8
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.05
    for line in metrics:
        expected = {"policy/clip_fraction", "policy/entropy", "group/std_mean", "rollout/logprob_gap_max"}
        if options["name"] == "rejection-sampling":
            if line.get("policy/skipped"):
                continue  # the answers to each prompt have equal scores, so that none is imitated
            expected -= {"rollout/logprob_gap_max"}  # is of the first update of an episode, which may be skipped
        assert expected <= set(line)
        assert not [key for key in line if key.startswith(("value/", "critic/"))]
        assert ("kl/mean" in line) == (options.get("kl_coef") != 0 and options["name"] != "rejection-sampling")


def test_a_greedy_answer_beside_each_prompt_is_the_baseline(tmp_path: Path) -> None:
    train = {"episodes": 3, "prompts_per_episode": 16, "samples_per_prompt": 1, "train_batch_size": 16}
    metrics = start({"name": "reinforce++", "advantage": "remax", "kl_coef": 0}, tmp_path, train=train)
    assert all(0 <= line["rollout/greedy_score_mean"] <= 1 for line in metrics)
    assert metrics[0]["loss/policy"] != 0.0
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert [each["sample_id"] for each in samples] == list(range(48)), "it is scored, and not trained on"


def test_the_trainer_agrees_with_the_engine(tmp_path: Path) -> None:
    """Same module, same arithmetic: every weight is 1, and nothing is masked."""
    options = {"name": "grpo", "importance_cap": 1.5, "importance_sequence_range": [0.9, 1.1], "kl_coef": 0}
    for line in start(options, tmp_path, model={"lora": {"r": 2}}):
        assert line["off_policy/effective_sample_size"] == pytest.approx(1.0, abs=1e-5)
        assert line["off_policy/masked_fraction"] == 0.0
        assert line["off_policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_dynamic_sampling_refills_with_later_prompts(tmp_path: Path) -> None:
    """Two answers of at most two tokens are often as short as each other: such prompts are replaced."""
    options = {"name": "grpo", "dynamic_sampling": True, "kl_coef": 0}
    sizes = {"episodes": 2, "prompts_per_episode": 8, "samples_per_prompt": 2, "train_batch_size": 16}
    metrics = start(options, tmp_path, train=sizes, engine={"max_new_tokens": 2})
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    ids = [json.loads(line)["sample_id"] for line in samples]
    assert len(ids) == 32 and max(ids) >= 32, "later prompts of the stream took the place of refused ones"
    assert all(line["group/without_spread_fraction"] == 0.0 for line in metrics)
    refused = {line["episode"]: line["rollout/refused_prompts"] for line in metrics}
    assert sum(refused.values()) >= max(ids) // 2 + 1 - 16
