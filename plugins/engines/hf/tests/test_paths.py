"""Every causal LM generates: by the fastest way that reproduces its plain forward."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast

from rlhf_core.types import SamplingParams


class BagOfTokens(nn.Module):
    """A causal LM without cache, positions or mask: logits from the mean of all embeddings so far."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.config = PretrainedConfig(vocab_size=vocabulary)
        self.embedding = nn.Embedding(vocabulary, 16)
        self.head = nn.Linear(16, vocabulary)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        states = self.embedding(input_ids).cumsum(1)
        return CausalLMOutput(logits=self.head(states / torch.arange(1, input_ids.shape[1] + 1)[:, None]))


class OldNames(LlamaForCausalLM):
    """A model with its own code, in which the cache has the names of transformers before 5.24."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        output = super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)
        return CausalLMOutputWithPast(logits=output.logits, past_key_values=_cache_of(output))


class NewNames(LlamaForCausalLM):
    """A model in which the cache has the names of transformers since 5.24."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None):
        output = super().forward(input_ids, attention_mask, position_ids, cache, use_cache=use_cache)
        return SimpleNamespace(logits=output.logits, cache=_cache_of(output))


def _cache_of(output):
    return output.cache if hasattr(output, "cache") else output.past_key_values


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("llama", "slots"),
        ("gpt2", "slots"),
        ("qwen2", "slots"),
        ("neox", "slots"),
        ("llama-eager", "slots"),
        ("mistral-window", "padded"),
        ("mamba", "equal"),
    ],
)
def test_path_of_each_family(family, path, model, engine):
    assert engine(model(family)).path.name == path


@pytest.mark.parametrize("kind", [OldNames, NewNames])
def test_the_cache_has_the_old_or_the_new_names(kind, model, engine, requests, collect):
    plain = model("llama")
    module = kind(plain.config)
    module.load_state_dict(plain.state_dict())
    made, asked = engine(module), requests(6, same=2)
    assert made.path.name == "slots"
    options = SamplingParams(max_new_tokens=8)
    found, expected = collect(made, asked, options), collect(engine(plain), asked, options)
    assert {key: each.token_ids for key, each in found.items()} == {
        key: each.token_ids for key, each in expected.items()
    }


def test_a_model_without_cache_is_recomputed(engine, requests, collect):
    torch.manual_seed(0)
    module, asked = BagOfTokens(47), requests(20, same=2)
    made = engine(module)
    answers = collect(made, asked, SamplingParams(max_new_tokens=12))
    assert made.path.name == "recompute"
    for request in asked:
        answer = answers[request.sample_id]
        logits = module(torch.tensor([[*request.prompt_ids, *answer.token_ids]])).logits[0].detach()
        expected = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(answer.token_ids)[:, None]).squeeze(-1)
        assert answer.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)


def test_the_safe_path_is_said_once_with_its_reason(model, engine, requests, collect, caplog):
    made = engine(model("mistral-window"))
    with caplog.at_level(logging.WARNING, logger="rlhf_hf.engine"):
        collect(made, requests(2), SamplingParams(max_new_tokens=3))
        collect(made, requests(2), SamplingParams(max_new_tokens=3))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "padded" in messages[0] and "sliding window" in messages[0]


def test_rows_of_a_length_dependent_rotary_embedding_are_not_mixed(engine):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, intermediate_size=48, num_attention_heads=4, vocab_size=47,
        max_position_embeddings=64, rope_parameters=rope,
    )  # fmt: skip
    path = engine(LlamaForCausalLM(config)).path
    assert path.name == "equal"
    assert "rotary" in path.reasons[0]
