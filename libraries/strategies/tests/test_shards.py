"""Weights as bounded shards, and as a folder that transformers reads."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import CheckpointError
from rlhf_core.util.tensor_files import untied_names
from rlhf_models import read_weights, stored_dtype
from rlhf_strategies.shards import group_into_shards, load_weights, save_weights, state_dict_shards_of
from rlhf_testing.tiny_training import tiny_model


@given(sizes=st.lists(st.integers(0, 9), max_size=12), limit=st.integers(1, 40))
def test_shards_keep_order_and_bound(sizes, limit):
    named = [(str(index), torch.zeros(size)) for index, size in enumerate(sizes)]
    shards = list(group_into_shards(iter(named), limit))
    assert [name for shard in shards for name in shard] == [name for name, _ in named]
    for shard in shards:
        assert shard
        assert len(shard) == 1 or sum(tensor.numel() * 4 for tensor in shard.values()) <= limit


def test_shards_are_made_one_at_a_time():
    alive: list[weakref.ref] = []

    def made():
        for index in range(20):
            # What a consumer holds is one shard of two tensors; one more is on its way in.
            assert sum(ref() is not None for ref in alive) <= 3
            tensor = torch.zeros(10)
            alive.append(weakref.ref(tensor))
            yield str(index), tensor
            del tensor

    for shard in group_into_shards(made(), 80):
        assert len(shard) == 2
        del shard


def test_a_bound_below_one_is_a_bug():
    with pytest.raises(ValueError, match="at least 1"):
        list(group_into_shards([], 0))


def test_tied_tensors_come_once_under_their_first_name():
    model = tiny_model()
    assert untied_names(model)["lm_head.weight"] == "model.embed_tokens.weight"
    names = [name for shard in state_dict_shards_of(model, 1) for name in shard]
    assert names == [name for name in model.state_dict() if name != "lm_head.weight"]


@pytest.mark.parametrize("limit", [10**9, 4096])
def test_a_saved_folder_loads_here_and_in_transformers(tmp_path, limit):
    from transformers import LlamaForCausalLM

    source, target = tiny_model(), tiny_model(seed=1)
    save_weights(tmp_path, state_dict_shards_of(source, limit))
    load_weights(target, tmp_path, lambda name, own, read: own.copy_(read))
    source.config.save_pretrained(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, tensor in source.state_dict().items():
        assert tensor.equal(target.state_dict()[name])
        assert tensor.equal(theirs.state_dict()[name])
    assert (tmp_path / "model.safetensors.index.json").exists() == (limit == 4096)


def test_saving_again_leaves_nothing_of_the_former(tmp_path):
    model = tiny_model()
    save_weights(tmp_path, state_dict_shards_of(model, 4096))
    save_weights(tmp_path, state_dict_shards_of(model, 10**9))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_ranks_that_do_not_write_only_gather(tmp_path):
    seen = []
    save_weights(tmp_path, (seen.append(1) or {"a": torch.ones(1)} for _ in range(3)), write=False)
    assert len(seen) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks 1 tensors.*model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "lacks 'extra'"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"shape \(3,\), the model's is \(16,\)"),
    ],
)
def test_names_and_shapes_must_match_exactly(tmp_path, change, message):
    tensors = dict(tiny_model().state_dict())
    change(tensors)
    save_weights(tmp_path, [tensors])
    with pytest.raises(CheckpointError, match=message):
        load_weights(tiny_model(), tmp_path, lambda name, own, read: None)


def test_no_weights_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="contains no model"):
        list(read_weights(tmp_path))


def test_the_files_of_a_booster_are_read(tmp_path):
    """ColossalAI writes one shard under the name of the first of some, without their number."""
    save_weights(tmp_path, iter([dict(tiny_model().state_dict())]))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001.safetensors")
    assert {name for name, _ in read_weights(tmp_path)} == set(tiny_model().state_dict())
    assert stored_dtype(tmp_path) is torch.float32


def test_saving_over_the_files_of_a_booster_leaves_none_of_them(tmp_path):
    save_weights(tmp_path, iter([dict(tiny_model().state_dict())]))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001.safetensors")
    halves = [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}]
    save_weights(tmp_path, iter(halves))
    assert [name for name, _ in read_weights(tmp_path)] == ["a", "b"]
