"""A reference that follows the policy: copies and averages in float64, its state, and what cannot be refreshed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_core.errors import CheckpointError, ConfigError
from rlhf_core.place import LocalPlace, Place
from rlhf_forward import RefreshedReference
from rlhf_testing.thread_ranks import Ranks

PLACE = LocalPlace(torch.device("cpu"), torch.float32)


_SEED = threading.Lock()
"""Held while the generator of all threads, which are ranks here, is used."""


def model(seed: int) -> nn.Module:
    with _SEED:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def refreshed(models: dict[str, nn.Module], place: Place = PLACE, every: int = 2, mix: float = 1.0) -> Any:
    context: Any = SimpleNamespace(place=place, models=models, temperature=1.0)
    return RefreshedReference(context, every=every, mix=mix)


def train(policy: nn.Module, version: int) -> None:
    torch.manual_seed(100 + version)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter))


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in module.parameters()])


@pytest.mark.parametrize("mix", [1.0, 0.3])
def test_it_follows_the_policy_at_each_refresh(mix: float) -> None:
    models = {"policy": model(0), "reference": model(0)}
    each, expected = refreshed(models, mix=mix), flat(models["reference"])
    for version in range(6):
        if version:
            train(models["policy"], version)
        each.published(version)
        if version in (2, 4):
            expected = (1 - mix) * expected + mix * flat(models["policy"])
        torch.testing.assert_close(flat(models["reference"]), expected, rtol=1e-6, atol=1e-6)
        each.published(version)  # as after a resume: nothing is averaged twice
        torch.testing.assert_close(flat(models["reference"]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (3, 3), (2, 3), (1, 2)])
def test_ranks_restore_it_from_their_parts(saved_by: int, loaded_by: int) -> None:
    def save(rank: int, place: Place) -> tuple[dict[str, Any], torch.Tensor]:
        models = {"policy": model(1), "reference": model(0)}
        each = refreshed(models, place, mix=0.5)
        each.published(2)
        return each.state_dict(), flat(models["reference"])

    saved = Ranks(saved_by).run(save)
    sizes = [len(state) - 1 for state, _ in saved]
    assert sum(sizes) == 4, "each tensor once"

    def load(rank: int, place: Place) -> torch.Tensor:
        models = {"policy": model(1), "reference": model(5)}
        each = refreshed(models, place, mix=0.5)
        each.load_state_dict(saved[rank % len(saved)][0])
        each.published(2)
        return flat(models["reference"])

    for restored in Ranks(loaded_by).run(load):
        assert torch.equal(restored, saved[0][1])


def test_fewer_ranks_than_parts_are_named() -> None:
    parts = Ranks(2).run(lambda _, place: refreshed({"policy": model(1), "reference": model(0)}, place).state_dict())
    with pytest.raises(CheckpointError, match="only 2 of 4 tensors of the reference"):
        refreshed({"policy": model(1), "reference": model(0)}).load_state_dict(parts[0])


def test_models_that_cannot_be_mixed_are_named_before_training() -> None:
    policy = model(0)
    sharding: Any = SimpleNamespace(shards_parameters=True, unwrap=lambda each: each, rank=0, world_size=1)
    for message, each in {
        "policy without its adapter": refreshed({"policy": policy, "reference": policy}),
        "a sharded reference is not refreshed": refreshed({"policy": policy, "reference": model(0)}, sharding),
        "needs float32 weights": refreshed({"policy": policy, "reference": model(0).bfloat16()}, mix=0.5),
        "only one of policy and reference has": refreshed({"policy": policy[0], "reference": model(0)}),
    }.items():
        with pytest.raises(ConfigError, match=rf"algorithm\.reference_every: .*{message}"):
            each.published(0)


def test_sixteen_bit_weights_are_copied_and_restored() -> None:
    models = {"policy": model(1).bfloat16(), "reference": model(0).bfloat16()}
    each = refreshed(models)
    each.published(2)
    state = each.state_dict()
    other = {"policy": model(1).bfloat16(), "reference": model(7).bfloat16()}
    refreshed(other).load_state_dict(state)
    assert torch.equal(flat(other["reference"]), flat(models["policy"]))
