"""A place of one process: what engines, passes and evaluations need, without a strategy."""

import pytest
import torch

from rlhf_core.place import LocalPlace, Place
from rlhf_core.strategy import Strategy


@pytest.fixture
def place():
    return LocalPlace(torch.device("cpu"), torch.float32, torch.bfloat16)


def test_it_is_alone(place):
    assert (place.rank, place.world_size, place.num_processes, place.is_main) == (0, 1, 1, True)
    assert place.all_gather_objects("mine") == ["mine"]
    assert place.broadcast_object(3) == place.agreed(3) == 3
    value = torch.ones(2)
    reduced = place.all_reduce(value, "max")
    assert torch.equal(reduced, value) and reduced is not value


def test_a_frozen_model_is_placed_whole(place):
    model = torch.nn.Linear(1, 1)
    placed = place.prepare_inference(model)
    assert place.unwrap(placed) is model and not place.shards_parameters
    assert not model.training and not model.weight.requires_grad


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_forwards_are_in_the_compute_type(compute_dtype):
    place = LocalPlace(torch.device("cpu"), torch.float32, compute_dtype)
    with place.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (compute_dtype or torch.float32)


def test_a_place_like_another_has_its_precision(place):
    copied = LocalPlace.like(place)
    assert (copied.device, copied.parameter_dtype, copied.compute_dtype) == (
        torch.device("cpu"),
        torch.float32,
        torch.bfloat16,
    )


def test_a_strategy_is_a_place_that_has_to_say_where_it_is():
    assert issubclass(Strategy, Place)
    assert {"rank", "world_size", "device", "all_reduce", "unwrap"} <= Strategy.__abstractmethods__
