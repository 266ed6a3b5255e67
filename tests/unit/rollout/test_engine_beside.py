"""An engine in a trainer's process."""

from types import SimpleNamespace

import pytest

from rlhf_core.rollout.weight_sync import build_engine_beside
from rlhf_testing.engine import FakeEngine


@pytest.mark.parametrize("shards_parameters", [False, True])
def test_the_engine_is_over_the_policy_where_that_is_whole(shards_parameters):
    import torch

    policy, copy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    strategy = SimpleNamespace(
        shards_parameters=shards_parameters, device=torch.device("cpu"), unwrap=lambda model: model
    )
    given = []

    def build(module):
        given.append(module)
        return FakeEngine()

    engine, publish = build_engine_beside(strategy, policy, build=build, copy=lambda: copy)
    assert given == [copy if shards_parameters else policy]
    assert (publish == engine.weights_updated) == (not shards_parameters)
    assert all(parameter.requires_grad != shards_parameters for parameter in given[0].parameters())
