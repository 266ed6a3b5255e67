"""`PPOTrainer(options=PPOConfig(…))`: every option of the algorithm works, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import UserInputError
from rlhf_ppo import PPOTrainer
from rlhf_ppo.config import PPOConfig

WORK: list[dict[str, Any]] = [
    {"clip_eps_high": 0.3, "dual_clip": 3.0},
    {"gamma": 0.9, "lam": 0.5, "whiten_advantages": False},
    {"kl_controller": "adaptive", "kl_target": 1.0, "kl_horizon_samples": 100},
    {"kl_in": "loss", "kl_estimator": "k3"},
    {"aggregation": "sequence-mean-token-sum-norm", "norm_length": 7},
    {"entropy_coef": 0.01},
    {"importance_cap": 2.0},
    {"importance_level": "sequence", "importance_token_range": (0.5, 2.0), "importance_sequence_range": (0.5, 2.0)},
    {"importance_outlier_range": (0.5, 2.0)},
    {"divergence_bound": 0.5, "divergence_estimator": "k2", "divergence_level": "token"},
    {"entropy_target": 9.0, "entropy_coef_step": 0.1, "entropy_coef_max": 0.2},
    {"policy_loss": "cispo"},
    {"advantage": "reward-to-go"},
    {"critic_lam": 0.1},
    {"lam_alpha": 0.1},
    {"kl_in": "loss", "kl_ratio": True, "kl_coef": 0.1},
    {"critic_warmup_episodes": 1},
    {"overlong_buffer_tokens": 2, "overlong_penalty": 2.0},
    {"mask_truncated": True},
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"clip_eps": 0.1}, {}, "eps_clip"),
    ({"value_clip": None}, {}, "value_clip"),
    ({"vf_coef": 0.5}, {}, "vf_coef"),
    ({"kl_coef": 0.5}, {"kl_coef": 0.1}, "kl_coef"),
    ({"aggregation": "token-mean"}, {"apply_loss_mask": False}, "apply_loss_mask"),
    ({"ptx_coef": 0.5, "ptx_path": "text.jsonl"}, {}, "pretrain_dataloader"),
    ({"ptx_max_tokens": 9}, {}, "ptx_max_tokens"),
    ({"critic": {"path": "folder"}}, {}, "critic=Critic"),
    ({"reference_every": 2, "reference_mix": 0.5}, {}, "the reference is an argument of the trainer"),
    ({"reference_mix": 0.5}, {}, "the reference is an argument of the trainer"),
]


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_no_option_is_forgotten() -> None:
    tried = {name for options in (*WORK, *(options for options, *_ in REFUSED)) for name in options}
    assert tried == set(PPOConfig.model_fields)


@pytest.mark.parametrize("options", WORK)
@pytest.mark.slow_except("options0", "options3", "options6", "options9", "options12", "options15", "options18")
def test_an_option_takes_effect(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    losses = []
    for name, given in (("plain", PPOConfig()), ("changed", PPOConfig(**options))):
        folder = str(tmp_path / name)
        make_trainer(options=given, lr=3e-2, value_clip=0.2).fit(3, 1, 2, prompt_loader, log_dir=folder)
        rows = lines(folder)
        assert len(rows) == 6
        losses.append([[row.get(name) for name in ("loss/policy", "loss/value", "policy/entropy")] for row in rows])
    # On one engine in one process importance weights are 1; dual_clip and the clip need a far policy.
    assert (
        losses[0] != losses[1]
        or "dual_clip" in options
        or any(name.startswith(("importance", "divergence")) for name in options)
    )


def test_importance_weights_compare_trainer_and_engine(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str
) -> None:
    make_trainer(options=PPOConfig(importance_cap=2.0), temperature=0.7).fit(2, 1, 2, prompt_loader, log_dir=folder)
    for row in lines(folder):
        assert row["off_policy/weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["off_policy/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("options", "parameters", "named"), REFUSED)
def test_what_the_class_says_itself_is_refused_by_name(
    make_trainer: Callable[..., PPOTrainer], options: dict[str, Any], parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserInputError, match=named) as error:
        make_trainer(options=PPOConfig(**options), **parameters)
    assert all(name in str(error.value) for name in options)


def test_the_same_said_twice_is_no_error(make_trainer: Callable[..., PPOTrainer]) -> None:
    make_trainer(options=PPOConfig(clip_eps=0.3), eps_clip=0.3)
