"""Trees of tensors and values: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rlhf_core.errors import CheckpointError
from rlhf_core.util.tensor_files import load_tree, save_tree

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), tensors)
keys = st.one_of(st.text(max_size=5), st.integers(-9, 9), st.sampled_from(["$tensor", "$tuple", "$dict"]))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(max_examples=60)
@given(tree=trees)
def test_round_trip(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "state.safetensors"
    save_tree(path, tree)
    assert same(load_tree(path), tree)
    assert [file.name for file in path.parent.iterdir()] == ["state.safetensors"]


def test_optimizer_and_random_state(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    tree = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "inf": -math.inf}
    save_tree(tmp_path / "x", tree)
    assert same(load_tree(tmp_path / "x"), tree)


def test_views_and_shared_memory(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    tree = [base, base.T, base[0], base]
    save_tree(tmp_path / "x", tree)
    assert same(load_tree(tmp_path / "x"), tree)


@pytest.mark.parametrize("bad", [{1, 2}, b"raw", object(), 1j])
def test_what_cannot_be_stored_is_named(tmp_path, bad):
    with pytest.raises(CheckpointError, match=rf"tree\.a\[0\]: a {type(bad).__name__}"):
        save_tree(tmp_path / "x", {"a": [bad]})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    save_tree(path, {"a": 1})
    with pytest.raises(CheckpointError):
        save_tree(path, {"a": {frozenset(): 3}})
    assert load_tree(path) == {"a": 1}


def test_other_files_are_refused(tmp_path):
    (tmp_path / "junk").write_bytes(b"not a tensor file at all")
    save_file({"a": torch.ones(1)}, str(tmp_path / "plain"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tree(tmp_path / "junk")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tree(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="not a tree"):
        load_tree(tmp_path / "plain")
