"""The plan of a run on a GPU against the peak that torch's allocator measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rlhf_core import train
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_plan import plan_run
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.runs import tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl_coef": 0.1}},
    "grpo-bfloat16": {"algorithm": {"name": "grpo", "kl_coef": 0.1}, "model": {"dtype": "bfloat16"}},
    "grpo-lora": {"algorithm": {"name": "grpo", "kl_coef": 0.1}, "model": {"lora": {"r": 8}}},
    "grpo-fp32": {"algorithm": {"name": "grpo", "kl_coef": 0.1}, "strategy": {"name": "single", "precision": "fp32"}},
    "ppo": {"algorithm": {"name": "ppo", "kl_coef": 0.1}},
    "ppo-checkpointing": {"algorithm": {"name": "ppo", "kl_coef": 0.1}, "model": {"gradient_checkpointing": True}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 120M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16_000, tie_word_embeddings=True)).save_pretrained(path)
    tiny_tokenizer("0123456789>,").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_near_the_measured_peak(name: str, folder: str, tmp_path: Any, no_plots: None) -> None:
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = tiny_run(CASES[name])
    run["model"] |= {"path": folder, "device": "cuda"}
    run["engine"] |= {"max_new_tokens": 100}
    run["train"] |= {"prompts_per_episode": 16, "samples_per_prompt": 4, "train_batch_size": 64}
    resolved = resolve(run)
    planned = plan_run(resolved, check_run(resolved)).processes[0].total_bytes
    train(run, output=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    measured = json.loads(lines[-1])["memory/peak_bytes"]
    print(f"{name}: planned {planned / 1e9:.2f} GB, measured {measured / 1e9:.2f} GB, {planned / measured:.2f}")
    assert 0.7 < planned / measured < 1.4
