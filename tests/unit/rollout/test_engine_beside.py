"""An engine in a trainer's process."""

from types import SimpleNamespace

import pytest

from rlhf_core.rollout.weight_sync import build_colocated_engine
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

    engine, publish = build_colocated_engine(strategy, policy, build=build, copy=lambda: copy)
    assert given == [copy if shards_parameters else policy]
    assert (publish == engine.weights_updated) == (not shards_parameters)
    assert all(parameter.requires_grad != shards_parameters for parameter in given[0].parameters())


def test_a_published_version_survives_a_strategy_that_reuses_its_buffer():
    import torch

    two = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2, bias=False))

    def shards(policy, max_shard_bytes):
        buffer = torch.empty(2)
        buffer.fill_(1)
        yield {"0.weight": buffer.view(1, 2)}
        buffer.fill_(2)
        yield {"1.weight": buffer.view(2, 1)}

    strategy = SimpleNamespace(shards_parameters=True, device=torch.device("cpu"), state_dict_shards=shards)
    engine, publish = build_colocated_engine(strategy, two, build=lambda module: FakeEngine(), copy=lambda: two)
    for version in (1, 2):
        publish(version)
        assert engine.policy_version == version
    assert torch.equal(two[0].weight.detach(), torch.ones(1, 2))
    assert torch.equal(two[1].weight.detach(), torch.full((2, 1), 2.0))
