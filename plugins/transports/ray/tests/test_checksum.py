"""A checksum is that of the bits, and notices any change of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.rollout import named_weights
from rlhf_core.util import state_dict_shards_of
from rlhf_ray.checksum import Checksum
from rlhf_testing.models import tiny_model


def checksum_of(tensors):
    total = Checksum()
    total.add(tensors)
    return total.hexdigest()


@settings(max_examples=30)
@given(shard_bytes=st.integers(1, 3000), seed=st.integers(0, 3), data=st.data())
def test_a_checksum_is_that_of_the_tensors_however_they_were_cut(shard_bytes, seed, data):
    model = tiny_model(seed=seed, num_layers=1)
    whole = checksum_of(named_weights(model))
    shards = data.draw(st.permutations(list(state_dict_shards_of(model, shard_bytes))))
    total = Checksum()
    for shard in shards:
        total.add(shard)
    assert total.hexdigest() == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_a_checksum_notices_a_change_anywhere(dtype):
    tensor = (torch.arange(10_000) % 7 % 2).to(dtype)
    reference = checksum_of({"w": tensor})
    for place in (0, 4095, 4096, 9_999):
        changed = tensor.clone()
        changed[place] = 1 - int(tensor[place])
        assert checksum_of({"w": changed}) != reference
    assert checksum_of({"w": tensor.reshape(100, 100)}) != reference
    assert checksum_of({"v": tensor}) != reference
    assert checksum_of({"w": tensor.roll(4096)}) != reference


@pytest.mark.parametrize("size", [4097, 200_000])
@pytest.mark.parametrize("distance", [1, 2, 4095, 8192])
def test_a_checksum_notices_values_that_changed_places(size, distance):
    tensor = torch.arange(float(size))
    reference = checksum_of({"w": tensor})
    for place in (0, 3, size // 2 + 1):
        changed = tensor.clone()
        other = (place + distance) % size
        changed[place], changed[other] = tensor[other], tensor[place]
        assert checksum_of({"w": changed}) != reference
    assert checksum_of({"w": tensor.flip(0)}) != reference


def test_empty_and_scalar_tensors_have_checksums():
    assert checksum_of({"a": torch.zeros(0), "b": torch.tensor(1)}) != checksum_of({"a": torch.zeros(0)})


class OutOfPlace(torch.Tensor):
    """As ColossalAI's ColoTensor: its in-place sum is another tensor, and so is what is made of it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(torch.Tensor.add if func is torch.Tensor.add_ else func, types, args, kwargs)


def out_of_place(tensor):
    return tensor.clone().as_subclass(OutOfPlace)


def test_a_checksum_is_that_of_the_bits_whatever_class_the_tensor_is_of():
    rows = torch.arange(3 * 4096, dtype=torch.float64)  # of 8 bytes: three rows of a checksum
    assert checksum_of({"x": out_of_place(rows)}) == checksum_of({"x": rows})
    swapped = rows.view(3, 4096)[[1, 0, 2]].flatten()
    assert checksum_of({"x": out_of_place(swapped)}) != checksum_of({"x": rows})
