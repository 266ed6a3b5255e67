"""What does not go together is refused by name, before a weight is loaded, with what to type instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.errors import ConfigError
from rlhf_testing.runs import tiny_run

RAY = {"name": "ray"}
NUMBER = "guess-number"
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "single x processes": ({"strategy": {"name": "single"}}, 2, "strategy single supports one process.*strategy .*ddp"),
    "ray x processes": ({"transport": RAY, "strategy": {"name": "ddp"}}, 2, "--set transport.num_trainers=2"),
    "ray trainers x single": ({"transport": {**RAY, "num_trainers": 2}}, 1, "strategy single supports one process"),
    "processes x small batch": ({"strategy": {"name": "ddp"}}, 5, "--set train.prompts_per_episode=5"),
    "grpo x group of one": (
        {"algorithm": {"name": "grpo"}, "train": {"samples_per_prompt": 1}},
        1,
        "nothing is learned from a group of one",
    ),
    "grpo x critic": (
        {"algorithm": {"name": "grpo"}, "optimizer": {"critic_lr": 1e-3}},
        1,
        "grpo does not train a critic",
    ),
    "reward-model x rewards": ({"algorithm": {"name": "reward-model"}}, 1, "not answers that a reward"),
    "sft x environment": (
        {"algorithm": {"name": "sft"}, "rewards": None, "environment": {"name": NUMBER}},
        1,
        "sft learns from a dataset",
    ),
    "ppo turns x normalised sum": (
        {"environment": {"name": NUMBER}, "reward_scaling": {"normalise": True}},
        1,
        "ppo gives each turn its own reward",
    ),
    "vllm x top_p": ({"engine": {"name": "vllm", "max_new_tokens": 4, "top_p": 0.9}}, 1, "top_p needs top_k"),
    "adaptive x KL in the loss": (
        {"algorithm": {"name": "ppo", "kl_in": "loss", "kl_controller": "adaptive"}},
        1,
        "set kl_in to reward",
    ),
    "gemini x fp32": ({"strategy": {"name": "gemini", "precision": "fp32"}}, 1, "bf16"),
}


@pytest.mark.parametrize("pair", REFUSED)
def test_it_is_refused_by_name(pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).with_name("stand_in"))  # a module `vllm`
    changes, num_processes, message = REFUSED[pair]
    run = {key: value for key, value in tiny_run(changes).items() if value is not None}
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        train(run, output=tmp_path / "run", num_processes=num_processes, dry_run=True)
    assert not (tmp_path / "run").exists()
