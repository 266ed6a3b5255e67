"""Checkpoints of PPOTrainer load again, and the run goes on as if it had not stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.errors import CheckpointError, UserInputError
from rlhf_ppo import PPOTrainer
from rlhf_ppo.config import PPOConfig

ADAPTIVE = PPOConfig(kl_controller="adaptive", kl_target=0.01, kl_horizon_samples=50)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines without what the clock and the machine decide."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "tokens_per_second/", "memory/", "reward_calls/")
    return [{key: value for key, value in row.items() if not key.startswith(measured)} for row in rows]


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    models = {"actor": trainer.actor, "critic": trainer.critic}
    return {f"{role}.{name}": t.clone() for role, model in models.items() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"sample_buffer": True, "train_batch_size": 4}])
@pytest.mark.slow_except("options0")
def test_a_resumed_run_equals_an_uninterrupted_one(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = make_trainer(options=ADAPTIVE, **options)
    whole.fit(4, 1, 2, prompt_loader, log_dir=str(tmp_path / "whole"))

    saving = {"save_interval": 1, "save_dir": str(tmp_path / "saved")}
    first = make_trainer(options=ADAPTIVE, **saving, **options)
    first.fit(2, 1, 2, prompt_loader, log_dir=str(tmp_path / "parts"))
    second = make_trainer(options=ADAPTIVE, **saving, **options)
    assert second.load_checkpoint() == 2
    second.fit(4, 1, 2, prompt_loader, log_dir=str(tmp_path / "parts"))

    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    ours, theirs = weights(second), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_is_in_a_checkpoint(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path) -> None:
    trainer = make_trainer(save_interval=1, save_dir=str(tmp_path))
    trainer.fit(2, 1, 1, prompt_loader)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-2"]
    newest = tmp_path / "step-2"
    assert {path.name for path in newest.iterdir()} >= {"policy", "critic", "policy-optimizer", "critic-optimizer"}
    assert not [path for path in newest.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    actor = AutoModelForCausalLM.from_pretrained(newest / "policy")
    for name, tensor in trainer.actor.state_dict().items():
        assert torch.equal(actor.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(newest / "policy")("12>")["input_ids"] == [5, 6, 14]


def test_an_older_checkpoint_by_its_path(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path
) -> None:
    make_trainer(save_interval=1, save_dir=str(tmp_path)).fit(2, 1, 1, prompt_loader)
    trainer = make_trainer()
    assert trainer.load_checkpoint(tmp_path / "step-1") == 1
    assert trainer.num_train_step == 1


def test_a_damaged_or_missing_checkpoint_is_named(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        make_trainer(save_interval=1, save_dir=str(tmp_path)).load_checkpoint()
    make_trainer(save_interval=1, save_dir=str(tmp_path)).fit(1, 1, 1, prompt_loader)
    (tmp_path / "step-1" / "policy" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserInputError, match="damaged"):
        make_trainer().load_checkpoint(tmp_path / "step-1")


def test_the_reference_is_not_what_is_loaded(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path, actor: Any
) -> None:
    saving = {"save_interval": 1, "save_dir": str(tmp_path)}
    make_trainer(lr=1e-2, **saving).fit(1, 1, 2, prompt_loader)
    trainer = make_trainer(reference=actor, **saving)
    trainer.load_checkpoint()
    changed = [
        name for name, tensor in actor.state_dict().items() if not torch.equal(trainer.actor.state_dict()[name], tensor)
    ]
    assert changed
