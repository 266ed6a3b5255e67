"""Data files of preference pairs and of supervised examples, on sorting digits."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.components import AlgorithmContext
from rlhf_core.plugins.selected import load
from rlhf_core.types import SamplingParams
from rlhf_testing.models import tiny_tokenizer


def make_algorithm(name: str, options: Mapping[str, Any] | None = None, tokenizer: Any = None) -> Any:
    selected = load("algorithms", name)
    context = AlgorithmContext(sampling=SamplingParams(), samples_per_prompt=1, tokenizer=tokenizer or tiny_tokenizer())
    return selected.build(selected.component.config.model_validate(dict(options or {})), context)


@pytest.fixture
def algorithm() -> Any:
    """algorithm(name, options, tokenizer)."""
    return make_algorithm


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Prompts with the sorted digits as `completion` and `chosen`, the reverse as `rejected`."""
    draw = random.Random(0)
    rows = []
    while len(rows) < 160:
        digits = [draw.choice("0123456789") for _ in range(draw.randint(2, 5))]
        good, bad = "".join(sorted(digits)), "".join(sorted(digits, reverse=True))
        if good != bad:
            prompt = "".join(digits) + ">"
            rows.append({"prompt": prompt, "completion": good, "chosen": good, "rejected": bad, "margin": 0.5})
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run_file(lines: Path) -> Any:
    """run_file(algorithm section, **changed sections)."""

    def make(options: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        run: dict[str, Any] = {
            "model": {"path": "builtin:tiny-digits", "device": "cpu"},
            "prompts": {"name": "jsonl", "path": str(lines)},
            "eval": {"every_episodes": 2, "num_prompts": 40},
            "algorithm": dict(options),
            "optimizer": {"lr": 1e-3},
            "train": {"episodes": 4, "prompts_per_episode": 60, "train_batch_size": 30},
            "checkpoint": {"every_episodes": None},
            "logging": {"tensorboard": False},
        }
        return {**run, **changes}

    return make
