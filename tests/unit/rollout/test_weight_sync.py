"""Weights arrive whole or not at all."""

import pytest
import torch
from torch import nn

from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import SyncError
from rlhf_core.rollout.weight_sync import named_weights, replace_weights
from rlhf_models import CausalLM
from rlhf_strategies import state_dict_shards_of
from rlhf_testing.models import tiny_model


class Tied(nn.Module):
    """Two names for one tensor, a buffer, and one that is not saved."""

    def __init__(self, value=0.0):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)


def weights(module):
    return {name: tensor.detach().clone() for name, tensor in named_weights(module).items()}


def test_a_version_replaces_every_weight_in_place():
    module = Tied(1.0)
    address = module.embed.weight.data_ptr()
    replace_weights(module, weights(Tied(2.0)), 7)
    assert all(torch.equal(tensor, torch.full_like(tensor, 2)) for tensor in module.state_dict().values())
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.data_ptr() == address


def test_tied_tensors_have_one_name():
    assert "embed.weight" in named_weights(Tied())
    assert "head.weight" not in named_weights(Tied())
    assert "scratch" not in named_weights(Tied())


def broken(what):
    tensors = weights(Tied(2.0))
    if what == "missing":
        del tensors["norm.bias"]
    elif what == "unexpected":
        tensors["extra"] = torch.zeros(1)
    elif what == "wrong shape":
        tensors["norm.bias"] = torch.zeros(1)
    return tensors


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "missing norm.bias"),
        ("unexpected", "unexpected extra"),
        ("wrong shape", r"norm.bias: \(1,\) for \(3,\)"),
    ],
)
def test_a_bad_version_leaves_the_old_weights(what, message):
    module = Tied(1.0)
    before = weights(module)
    with pytest.raises(SyncError, match=message):
        replace_weights(module, broken(what), 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(module).items())


def test_a_shape_that_would_broadcast_is_refused():
    module = Tied(1.0)
    tensors = weights(Tied(2.0))
    tensors["embed.weight"] = torch.zeros(1, 3)
    with pytest.raises(SyncError, match="wrong shape"):
        replace_weights(module, tensors, 1)
    assert torch.equal(module.embed.weight.detach(), torch.ones(5, 3))


def test_weights_of_another_dtype_are_converted():
    module = Tied(1.0).to(torch.bfloat16)
    replace_weights(module, {name: tensor.float() for name, tensor in weights(Tied(1.5)).items()}, 1)
    assert module.embed.weight.dtype == torch.bfloat16
    assert torch.equal(module.embed.weight.detach().float(), torch.full((5, 3), 1.5))


def is_adapter_weight(name):
    return "lora_" in name


def test_an_adapter_replaces_the_adapter_and_nothing_accumulates():
    source, target = (CausalLM().add_adapter(tiny_model(seed=0), LoraConfig(r=2), seed) for seed in (1, 2))
    base = {name: tensor for name, tensor in weights(target).items() if not is_adapter_weight(name)}
    for version in (1, 2):
        arrived = {n: t for shard in state_dict_shards_of(source, 256, is_adapter_weight) for n, t in shard.items()}
        replace_weights(target, arrived, version, only=is_adapter_weight)
    now = weights(target)
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())
    sent = {name: tensor for name, tensor in weights(source).items() if is_adapter_weight(name)}
    assert sent
    assert all(torch.equal(now[name], tensor) for name, tensor in sent.items())
    with pytest.raises(SyncError, match="unexpected"):
        replace_weights(target, weights(source), 3, only=is_adapter_weight)


class OutOfPlace(torch.Tensor):
    """As ColossalAI's ColoTensor: its in-place sum is another tensor, and so is what is made of it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(torch.Tensor.add if func is torch.Tensor.add_ else func, types, args, kwargs)


def out_of_place(tensor):
    return tensor.clone().as_subclass(OutOfPlace)


def test_what_leaves_a_strategy_is_plain_tensors():
    """Also a subclass's: whoever is given it may change it in place."""
    module = nn.Linear(2, 3)
    module.register_buffer("clever", out_of_place(torch.ones(3)))
    module.weight = nn.Parameter(out_of_place(module.weight.detach()))
    for shards in (
        list(state_dict_shards_of(module, 1)),
        list(state_dict_shards_of(module, 1, gather=lambda name, tensor: out_of_place(tensor))),
    ):
        tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
        assert {type(tensor) for tensor in tensors.values()} == {torch.Tensor}
        assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in tensors.items())
