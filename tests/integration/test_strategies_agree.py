"""The same run file under every strategy, changed by one word, with real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("strategy_runs.py")
PROCESSES = ["ddp", "low-level-zero", "fsdp", "gemini"]
EXACT = ["ddp", "low-level-zero", "fsdp"]
DEADLINE_SECONDS = 280


def _start(out: Path, names: list[str], num_processes: int) -> None:
    """Run the script as `num_processes` ranks, as a launcher would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(num_processes):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
        env["LOCAL_WORLD_SIZE"] = str(num_processes)
        command = [sys.executable, str(SCRIPT), str(out), str(rank), ",".join(names)]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        printed = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    assert codes == [0] * num_processes, "\n".join(text[-3000:] for text in printed)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    _start(out, ["single"], 1)
    _start(out, PROCESSES, 2)
    return out


def _lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _untimed(run: Path) -> list[dict[str, Any]]:
    timed = ("time/", "tokens_per_second/", "memory/", "reward_calls/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in _lines(run)]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kind", ["", "-lora"])
def test_losses_agree_with_single(runs: Path, name: str, kind: str) -> None:
    ours, single = _lines(runs / f"{name}{kind}"), _lines(runs / f"single{kind}")
    assert len(ours) == len(single) == 9
    for mine, theirs in zip(ours, single, strict=True):
        for key in ("loss/policy", "loss/value", "reward/mean", "kl/mean", "policy/entropy", "policy/grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-5, rel=1e-4), (mine["step"], key)


def test_samples_are_those_of_single(runs: Path) -> None:
    def samples(name: str) -> list[Any]:
        lines = (runs / name / "samples.jsonl").read_text().splitlines()
        return [(s["sample_id"], s["completion"]) for s in map(json.loads, lines)]

    expected = samples("single")
    assert [sample for sample, _ in expected] == list(range(198))
    for name in EXACT:
        assert samples(name) == expected


def test_gemini_follows_in_bf16(runs: Path) -> None:
    ours, single = _lines(runs / "gemini"), _lines(runs / "single")
    assert len(ours) == len(single)
    for mine, theirs in zip(ours, single, strict=True):
        assert mine["loss/value"] == pytest.approx(theirs["loss/value"], rel=0.05), mine["step"]
        assert mine["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=0.05), mine["step"]


def test_gemini_changes_weights_as_single_does(runs: Path) -> None:
    from rlhf_core.builtin_models import build_builtin

    start = build_builtin("builtin:tiny-digits", 3)[0].state_dict()
    change = {}
    for name in ("single", "gemini"):
        weights = load_file(runs / name / "model" / "model.safetensors")
        change[name] = torch.cat([(weights[k].float() - start[k].float()).flatten() for k in sorted(weights)])
    assert change["gemini"].norm() > 0.5 * change["single"].norm()
    cosine = torch.nn.functional.cosine_similarity(change["single"], change["gemini"], dim=0)
    assert cosine > 0.9


@pytest.mark.parametrize("name", ["single", *PROCESSES])
def test_resume_repeats_the_run(runs: Path, name: str) -> None:
    resumed, whole = _untimed(runs / f"{name}-resumed"), _untimed(runs / name)
    assert len(resumed) == len(whole)
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["single", *PROCESSES])
def test_model_folder_is_plain_transformers(runs: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(runs / name / "model")
    assert sum(p.numel() for p in model.parameters()) == 335_520
