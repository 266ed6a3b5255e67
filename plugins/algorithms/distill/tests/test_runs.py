"""Whole runs: the policy comes closer to its teacher, with and without rewards, adapters and several turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core import train
from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.config import ModelConfig
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_core.errors import ConfigError, UserInputError
from rlhf_models import load_policy
from rlhf_plan import plan_run
from rlhf_testing.models import builtin_model, tiny_model
from rlhf_testing.runs import tiny_run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another model with the policy's tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    model, tokenizer = builtin_model("builtin:tiny-digits", seed=7)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # sure of itself, so that there is something to learn
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_of(teacher: str, options: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return tiny_run({"algorithm": {"name": "distill", "teacher": {"path": teacher}, **(options or {})}, **changes})


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("options", "key"), [({"top_k": 6}, "loss/distill"), ({}, "distill/reverse_kl")], ids=["top_k", "sampled"]
)
@pytest.mark.slow_except("top_k-full")
def test_the_policy_comes_closer(
    teacher: str, tmp_path: Path, options: dict[str, Any], key: str, lora: dict[str, Any] | None
) -> None:
    run = run_of(
        teacher,
        options,
        model={"lora": lora},
        optimizer={"lr": 1e-2 if lora else 3e-3},
        rewards=[],
        eval=None,
        train={"episodes": 8, "prompts_per_episode": 16, "train_batch_size": 16},
    )
    result = train(run, output=tmp_path / "run")
    assert result is not None
    assert result.metrics[-1][key] < 0.8 * result.metrics[0][key]
    assert not [name for name in result.metrics[-1] if name.startswith("reward/")]
    assert (tmp_path / "run" / "samples.jsonl").read_text().count("\n") > 0


def test_turns_of_an_environment_are_taught(teacher: str, tmp_path: Path) -> None:
    run = run_of(teacher, {"top_k": 4}, environment={"name": "guess-number"}, prompts=None, rewards=None, eval=None)
    result = train(run, output=tmp_path / "run")
    assert result is not None
    assert result.metrics[-1]["loss/distill"] > 0 and "reward/environment" in result.metrics[-1]


SELF = {"policy": "current", "context": "{answer},{prompt}"}


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("policy", ["current", "start"])
@pytest.mark.slow_except("current-lora", "start-full")
def test_the_policy_teaches_itself(tmp_path: Path, policy: str, lora: dict[str, Any] | None) -> None:
    run = run_of("", {"teacher": {**SELF, "policy": policy}, "top_k": 6}, model={"lora": lora}, eval=None)
    result = train(run, output=tmp_path / "run")
    assert result is not None
    assert all(line["loss/distill"] > 0 and line["policy/grad_norm"] > 0 for line in result.metrics)


def test_a_run_without_a_good_answer_is_not_taught(tmp_path: Path) -> None:
    options = {"teacher": {"policy": "current", "context": "{prompt}{demonstration}>", "demonstration_score": 2}}
    result = train(run_of("", options, eval=None), output=tmp_path / "run")
    assert result is not None
    assert all(line["policy/skipped"] == 1 for line in result.metrics)


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
@pytest.mark.slow_except("full")
def test_a_teacher_with_other_tokens(tmp_path: Path, pairs: Any, lora: dict[str, Any] | None) -> None:
    folder = str(tmp_path / "other")
    tiny_model(pairs, seed=3).save_pretrained(folder)
    pairs.save_pretrained(folder)
    run = run_of("", {"teacher": {"path": folder, "tokenizer": folder}}, model={"lora": lora}, eval=None)
    result = train(run, output=tmp_path / "run")
    assert result is not None
    assert all("distill/reverse_kl" in line and line["policy/grad_norm"] > 0 for line in result.metrics)
    with pytest.raises(UserInputError, match="a different tokenizer than the policy"):
        train(run_of(folder), dry_run=True)


GAME = {"environment": {"name": "guess-number"}, "prompts": None, "rewards": None, "eval": None}


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"path": "builtin:tiny-digits", "tokenizer": "builtin:tiny-digits"}, GAME, "texts are aligned within one"),
        ({**SELF, "context": "{prompt}{feedback}"}, {}, "uses {feedback}, but the run has no environment"),
        ({**SELF, "context": "{prompt}{demonstration}"}, {"rewards": [], "eval": None}, "but the run has no rewards"),
        (
            {"server": {"url": "http://host/v1", "model": "large"}},
            {"prompts": {"name": "sort-digits", "num_digits": 3, "sampling": {"temperature": "heat"}}},
            "one temperature, but prompts.sampling sets others",
        ),
        (
            {"server": {"url": "http://host/v1", "model": "large"}},
            {"engine": {"banned_words": ["7"]}},
            "whole distribution, but engine.banned_words changes the policy's",
        ),
        (
            {"path": "builtin:tiny-digits", "tokenizer": "builtin:tiny-digits"},
            {"engine": {"banned_words": ["7"]}},
            "whole distribution, but engine.banned_words changes the policy's",
        ),
    ],
)
def test_teachers_that_do_not_fit_the_run(options: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(run_of("", {"teacher": options}, **changes), dry_run=True)


def test_the_plan_counts_the_teacher(teacher: str) -> None:
    resolved = resolve(run_of(teacher))
    plan = plan_run(resolved, check_run(resolved))
    (process,) = plan.processes
    assert process.bytes_by_part["teacher weights"] == process.bytes_by_part["policy weights"]
    half = resolve(run_of(teacher, {"teacher": {"path": teacher, "dtype": "bfloat16"}}))
    (process,) = plan_run(half, check_run(half)).processes
    assert 2 * process.bytes_by_part["teacher weights"] == process.bytes_by_part["policy weights"]


def test_what_cannot_be_taught_is_told_before_anything_runs(teacher: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set exactly one of teacher and teachers"):
        train(tiny_run({"algorithm": {"name": "distill"}}), dry_run=True)
    with pytest.raises(UserInputError, match=r"algorithm\.teacher\.path: there is no folder"):
        train(run_of(str(tmp_path / "nothing")), dry_run=True)
    tokenizer = builtin_model("builtin:tiny-digits", 0)[1]
    tokenizer.add_tokens(["new"])
    load_policy(ModelConfig(path=teacher), dtype=torch.float32, seed=0).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    with pytest.raises(UserInputError, match="a different tokenizer than the policy: 1 of the policy's 17 tokens"):
        train(run_of(teacher, model={"path": str(tmp_path / "policy")}), dry_run=True)


def test_ppo_has_no_teacher() -> None:
    algorithm = check_run(resolve(tiny_run())).algorithm
    assert isinstance(algorithm, RolloutAlgorithm) and algorithm.frozen_models == {}
