"""Query heads that share keys and values decode without copies of these."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations import sdpa_attention

from rlhf_core.types import SamplingParams
from rlhf_hf.forward import ModelForward, generating
from rlhf_hf.grouped import grouped_attention
from rlhf_hf.slot_model import SlotModel

PROMPTS = ([5, 6, 7, 8, 9], [10, 11])


def decoded(module, steps=3):
    """Logits [steps, rows, V] of decoding from `PROMPTS`."""
    with generating(module):
        slots = SlotModel(ModelForward(module), num_slots=2, max_tokens=16)
        _, layers = slots.prefill(PROMPTS)
        slots.cache.fill([0, 1], layers, [0, 1])
        lengths = [len(prompt) for prompt in PROMPTS]
        return torch.stack([slots.decode([12, 13], [length + step for length in lengths]) for step in range(steps)])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_it_decodes_what_copies_decode(model, family, monkeypatch):
    module = model(family)
    found = decoded(module)
    monkeypatch.setattr("rlhf_hf.grouped._shares_heads", lambda config: False)
    assert torch.allclose(found, decoded(module), atol=1e-5)


def test_nothing_is_copied_while_decoding(model, engine, requests, collect, monkeypatch):
    module = model("llama")
    made = engine(module)
    sampling = SamplingParams(max_new_tokens=6)
    expected = collect(made, requests(4, same=2), sampling)

    def copied(*arguments):
        raise AssertionError("keys or values were repeated for each query head")

    monkeypatch.setattr(sdpa_attention, "repeat_kv", copied)
    again = collect(made, requests(4, same=2), sampling)
    assert {k: c.token_ids for k, c in again.items()} == {k: c.token_ids for k, c in expected.items()}
    assert made.path.name == "slots"


@pytest.mark.parametrize("family", ["llama", "llama-eager", "gpt2"])
def test_a_configuration_is_as_before_afterwards(model, family):
    config = model(family).config
    before = config._attn_implementation
    with pytest.raises(KeyError), grouped_attention(config):
        raise KeyError
    assert config._attn_implementation == before
