"""Whole runs whose model is split over processes that compute the same rows together (`strategy.tensor_parallel`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_ray import quick_workers
from run_files import metrics, samples
from running import Forked, ranks, run_all
from safetensors.torch import load_file
from strategy_runs import run_file, train_one
from transformers import AutoModelForCausalLM

from rlhf_core import train
from rlhf_testing.models import builtin_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_plots"), pytest.mark.timeout(1200)]
TENSOR = {"name": "fsdp", "tensor_parallel": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
LEARNT = ("loss/policy", "loss/value", "reward/mean", "kl/mean", "policy/entropy", "policy/grad_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder, whose weights stay in it until each process reads its part."""
    path = tmp_path_factory.mktemp("model")
    for part in builtin_model("builtin:tiny-digits", 3):
        part.save_pretrained(path)
    return str(path)


def make(run: dict[str, Any], output: Path, processes: int, resume: str | None = None) -> Path:
    """The run, in so many processes."""
    places = ranks(processes) if processes > 1 else [None]
    run_all(*(Forked(train_one, run, output, resume, env=place) for place in places))
    return output


def assert_same_run(run: Path, other: Path) -> None:
    ours, theirs = metrics(run), metrics(other)
    assert len(ours) == len(theirs) == 6
    for mine, others in zip(ours, theirs, strict=True):
        for key in [key for key in LEARNT if key in others]:
            assert mine[key] == pytest.approx(others[key], abs=1e-5, rel=1e-4), (mine["step"], key)
    answers, expected = ([(each["sample_id"], each["completion"]) for each in samples(each)] for each in (run, other))
    assert answers == expected
    weights, expected_weights = (load_file(each / "model" / "model.safetensors") for each in (run, other))
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected_weights[name], atol=1e-4), name
    _, info = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize(("strategy", "algorithm", "lora"), [(TENSOR, "ppo", None), (SEQUENCE, "grpo", {"r": 4})])
def test_two_groups_of_two_train_as_one_process_and_go_on_in_other_layouts(
    tmp_path: Path, folder: str, strategy: dict[str, Any], algorithm: str, lora: dict[str, Any] | None
) -> None:
    changes = {"model": {"path": folder, "lora": lora}}

    def run(layout: dict[str, Any]) -> dict[str, Any]:
        # A large eps: Adam would make whole steps out of gradients that are but rounding.
        made = run_file(layout, **changes)
        return {**made, "algorithm": {"name": algorithm, "kl_coef": 0.05}, "optimizer": {"lr": 3e-4, "eps": 1e-4}}

    alone = make(run({"name": "single"}), tmp_path / "alone", 1)
    split = make(run(strategy), tmp_path / "split", 4)
    assert_same_run(split, alone)
    first = "step-3"
    for name, layout, processes in (("fsdp", {"name": "fsdp"}, 2), ("single", {"name": "single"}, 1)):
        copy = tmp_path / name
        shutil.copytree(split, copy)
        assert_same_run(make(run(layout), copy, processes, str(copy / "checkpoints" / first)), split)


def test_shards_of_groups_of_two_reach_the_makers(tmp_path: Path, folder: str, ray_worker_source: None) -> None:
    """Detached: the makers have whole policies, the trainers hold parts, and what travels are chunks of 64 KiB."""

    def run(strategy: dict[str, Any], transport: dict[str, Any]) -> dict[str, Any]:
        made = run_file(strategy, model={"path": folder})
        detached = {"name": "ray", "max_staleness": 0, "sync": "chunked", "max_shard_bytes": 65536}
        return {**made, "optimizer": {"lr": 3e-4, "eps": 1e-4}, "transport": {**detached, **transport}}

    with quick_workers():
        for name, strategy, trainers in (("alone", {"name": "single"}, 1), ("split", TENSOR, 4)):
            train(run(strategy, {"num_makers": 2, "num_trainers": trainers}), output=tmp_path / name)
    assert_same_run(tmp_path / "split", tmp_path / "alone")
