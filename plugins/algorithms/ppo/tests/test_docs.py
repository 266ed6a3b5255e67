"""The page says what the code has."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_objective import PolicyObjectiveSection
from rlhf_ppo import PPOTrainer
from rlhf_ppo.config import PPOConfig
from rlhf_seed.generation import KNOWN

PAGE = Path(__file__).parents[4] / "docs" / "algorithms" / "ppo.md"
SHARED = PAGE.with_name("policy-objective.md")
EVERY_RUN = ("time/", "tokens_per_second/", "memory/", "reward_calls/", "step", "episode", "policy_version")


@pytest.fixture
def documented() -> set[str]:
    text = PAGE.read_text(encoding="utf-8") + SHARED.read_text(encoding="utf-8")
    return set(re.findall(r"`([^`\s]+)`", text))


def test_every_option(documented: set[str]) -> None:
    assert set(PPOConfig.model_fields) <= documented


def test_every_parameter_of_the_trainer(documented: set[str]) -> None:
    assert set(inspect.signature(PPOTrainer).parameters) <= documented
    assert set(KNOWN) <= documented


def test_defaults_are_those_of_the_code() -> None:
    options = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("## Metrics")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| [^|]+ \|$", options, flags=re.MULTILINE)
    stated = {name: default.strip() for name, default in rows}
    assert stated.pop("critic.path") == json.dumps(PPOConfig().critic.path)
    told_of_all = set(PolicyObjectiveSection.model_fields) - set(stated)
    assert stated == {
        name: json.dumps(field.default).strip('"') if field.default != 10_000 else "10000"
        for name, field in PPOConfig.model_fields.items()
        if name not in told_of_all and name != "critic"
    }


def test_every_metric(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str, documented: set[str]
) -> None:
    everything = PPOConfig(entropy_coef=0.01, kl_in="loss", kl_estimator="k3", dual_clip=3.0)
    text = [{"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}]
    make_trainer(options=everything, ptx_coef=0.5).fit(1, 1, 1, prompt_loader, text, log_dir=folder)
    line = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[0])
    names = {name for name in line if not name.startswith(EVERY_RUN)} - {"reward/fraction_of_sevens"}
    assert {"loss/ptx", "loss/kl", "loss/entropy", "policy/dual_clip_fraction"} <= names
    assert names <= documented
