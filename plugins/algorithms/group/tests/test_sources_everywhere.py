"""All sources of loss in one update start with every strategy, with LoRA, and over Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_testing.runs import tiny_run

LORA = {"lora": {"r": 2}}
PLACES: dict[str, dict[str, Any]] = {
    "single with LoRA": {"model": LORA},
    "torch-ddp": {"strategy": {"name": "torch-ddp"}},
    "fsdp": {"strategy": {"name": "fsdp"}},
    "fsdp with LoRA": {"strategy": {"name": "fsdp"}, "model": LORA},
    "ddp": {"strategy": {"name": "ddp"}},
    "low-level-zero": {"strategy": {"name": "low-level-zero"}},
    "gemini with LoRA": {"strategy": {"name": "gemini"}, "model": LORA},
    "ray": {"transport": {"name": "ray"}},
}
SLOW = ("ray", "gemini with LoRA", "ddp", "fsdp with LoRA")


@pytest.mark.parametrize(
    "place", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PLACES]
)
def test_all_sources_start(place: str, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text('{"prompt": "312>", "completion": "123"}\n{"text": "21>12"}\n')
    sources = {"imitation": {"coef": 0.1}, "preference": {"coef": 0.1}, "records": {"path": str(records)}}
    run = tiny_run(
        {
            "algorithm": {"name": "grpo", **sources},
            "rewards": [{"name": "length", "target_tokens": 2}],
            "train": {"episodes": 1, "prompts_per_episode": 4, "samples_per_prompt": 4, "train_batch_size": 16},
            **PLACES[place],
        }
    )
    result = train(run, output=tmp_path / "run")
    assert result is not None
    (line,) = result.metrics
    assert {"loss/policy", "loss/kl", "loss/imitation", "loss/preference", "loss/records"} <= set(line)
    assert 0 < line["imitation/selected_fraction"] <= 0.25 and line["policy/grad_norm"] > 0
