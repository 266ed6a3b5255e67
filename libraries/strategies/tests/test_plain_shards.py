"""Weights for another engine: every weight once, in bounded pieces, with adapters merged."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_strategies import plain_shards
from rlhf_testing.tiny import contract_policy


@pytest.fixture
def module() -> torch.nn.Module:
    return contract_policy(hidden_size=64).eval()


def adapted(module):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapped = get_peft_model(module, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return wrapped


@pytest.mark.parametrize("max_shard_bytes", [1024, 20_000, 1024**3])
def test_every_weight_comes_once_in_pieces(max_shard_bytes, module):
    expected = dict(module.state_dict())
    got: dict[str, torch.Tensor] = {}
    for shard in plain_shards(module, max_shard_bytes):
        assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= max_shard_bytes
        assert not got.keys() & shard.keys()
        got |= shard
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize("max_shard_bytes", [1024, 20_000, 1024**3])
def test_an_adapter_is_merged_without_a_trace_in_the_module(max_shard_bytes, module):
    names = module.state_dict().keys()
    wrapped = adapted(module)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    got = [item for _ in range(2) for shard in plain_shards(wrapped, max_shard_bytes) for item in shard.items()]
    first, second = dict(got[: len(got) // 2]), dict(got[len(got) // 2 :])
    assert first.keys() == names and len(got) == 2 * len(names)
    assert all(torch.equal(first[name], second[name]) for name in first), "increments pile up"
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrapped.state_dict().items())
    merged = wrapped.merge_and_unload().state_dict()
    for name in first:
        torch.testing.assert_close(first[name], merged[name], rtol=0, atol=1e-6)


def test_tied_weights_come_once(module):
    module.lm_head.weight = module.model.embed_tokens.weight
    names = [name for shard in plain_shards(module, 1024) for name in shard]
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
