"""A policy under a LoRA adapter generates with the adapter, on the fast path."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_core.types import SamplingParams


def test_log_probs_are_those_of_the_adapted_policy(packs, model, engine, requests, collect):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = get_peft_model(model("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    made, asked = engine(module), requests(10)
    answers = collect(made, asked, SamplingParams(max_new_tokens=12))
    assert made.path.name == "slots"
    module.eval()
    moved = 0.0
    for request in asked:
        answer = answers[request.sample_id]
        ids = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
        chosen = torch.tensor(answer.token_ids)[:, None]
        place = slice(len(request.prompt_ids) - 1, -1)
        with torch.no_grad():
            adapted = module(ids).logits[0, place].log_softmax(-1).gather(-1, chosen).squeeze(-1)
            with module.disable_adapter():
                plain = module(ids).logits[0, place].log_softmax(-1).gather(-1, chosen).squeeze(-1)
        assert answer.logprobs == pytest.approx(adapted.tolist(), abs=1e-4)
        moved = max(moved, float((adapted - plain).abs().max()))
    assert moved > 0.1
