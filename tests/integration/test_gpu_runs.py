"""Whole tiny runs on a real GPU: every algorithm, in float32 and in bfloat16, and every path of the engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runs import PATHS, RUNS, run_once, save_inputs

from rlhf_hf import paths
from rlhf_hf.forward import ModelForward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GAPS = {"fp32": 1e-4, "bf16": 0.1}
"""Largest difference of a token's log-prob between engine and trainer, in nats."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    save_inputs(out)
    return out


def lines_of(run_folder: Path) -> list[dict[str, Any]]:
    """What a run measured, after the checks that hold for every run."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    # A process with PyTorch and CUDA is larger than the memory of these models on the GPU.
    assert 0 < lines[-1]["memory/peak_bytes"] < 1e9
    return lines


@pytest.mark.parametrize("precision", GAPS)
@pytest.mark.parametrize("name", RUNS)
def test_every_algorithm(name: str, precision: str, inputs: Path, no_plots: None) -> None:
    folder = f"{name}-{precision}"
    run_once(inputs, name, {**RUNS[name], "strategy": {"name": "single", "precision": precision}}, folder)
    for line in lines_of(inputs / folder):
        assert line.get("rollout/logprob_gap_max", 0.0) < GAPS[precision]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_the_engine(path: Any, inputs: Path, no_plots: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def choose(forward: ModelForward) -> paths.Path:
        taken.append(path)
        return paths.Path(path)

    monkeypatch.setattr("rlhf_hf.engine.choose_path", choose)
    run_once(inputs, "rloo", {**RUNS["rloo"], "strategy": {"name": "single", "precision": "fp32"}}, path)
    assert taken
    assert lines_of(inputs / path)[-1]["rollout/logprob_gap_max"] < GAPS["fp32"]


def test_the_fastest_path_is_taken(inputs: Path, no_plots: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def choose(forward: ModelForward) -> paths.Path:
        found = paths.choose_path(forward)
        taken.append("; ".join([found.name, *found.reasons]))
        return found

    monkeypatch.setattr("rlhf_hf.engine.choose_path", choose)
    run_once(inputs, "grpo", RUNS["grpo"], "fastest")
    assert set(taken) == {"slots"}


@pytest.mark.parametrize("strategy", ["torch-ddp", "fsdp"])
def test_strategies_for_several_processes_alone(strategy: str, inputs: Path, no_plots: None) -> None:
    run_once(inputs, "ppo", {**RUNS["ppo"], "strategy": {"name": strategy}}, strategy)
    lines_of(inputs / strategy)
