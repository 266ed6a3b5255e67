"""Reference log-probs and values equal a direct forward, whatever the batches."""

import pytest
import torch

from rlhf_core.batching import collate
from rlhf_core.models.forward import policy_forward, value_forward
from rlhf_core.models.reference_pass import ReferencePass
from rlhf_core.testing.models import tiny_model
from rlhf_core.testing.samples import make_group
from rlhf_core.types import RolloutGroup


@pytest.fixture
def groups():
    return [make_group(position, 2, num_actions=1 + position * 3 % 7) for position in range(6)]


@pytest.mark.parametrize("batch_tokens", [None, 1, 13, 30])
def test_equals_a_forward_of_each_sample_alone(setup, groups, batch_tokens):
    reference, critic = tiny_model(seed=9).eval(), setup.trained["critic"].model
    scoring = ReferencePass(
        setup.strategy, temperature=0.7, reference=reference, critic=critic, batch_tokens=batch_tokens
    )
    done = scoring.run(groups)
    assert [group.position for group in done] == [group.position for group in groups]
    for before, after in zip(groups, done, strict=True):
        assert after.rollouts == before.rollouts
        for item, filled in zip(before.items, after.items, strict=True):
            with torch.no_grad():
                log_probs = policy_forward(reference, collate([item]), 0.7).log_probs[0]
                values = value_forward(critic, collate([item]))[0]
            assert filled.sample_id == item.sample_id
            assert filled.reference_log_probs.shape == (item.num_response_tokens,)
            assert torch.allclose(filled.reference_log_probs, log_probs, atol=1e-5)
            assert torch.allclose(filled.values, values, atol=1e-5)
            assert not filled.values.requires_grad


def test_empty_groups_and_no_groups_pass_through(setup, groups):
    empty = RolloutGroup(position=50, rollouts=(), items=())
    scoring = ReferencePass(setup.strategy, temperature=1.0, critic=setup.trained["critic"].model)
    done = scoring.run([groups[0], empty, groups[1]])
    assert [len(group.items) for group in done] == [2, 0, 2]
    assert all(item.values is not None for group in done for item in group.items)
    assert scoring.run([]) == []


def test_without_models_nothing_is_added(setup, groups):
    assert ReferencePass(setup.strategy, temperature=1.0).run(groups) == groups


def test_the_mode_of_the_model_comes_back(setup, groups):
    critic = setup.trained["critic"].model.train()
    ReferencePass(setup.strategy, temperature=1.0, critic=critic).run(groups)
    assert critic.training


def test_an_offloaded_reference_is_on_the_device_for_its_pass_only(setup, groups, monkeypatch):
    reference, places = setup.trained["policy"].model, []
    monkeypatch.setattr(type(reference), "to", lambda self, device: places.append(str(device)))
    done = ReferencePass(setup.strategy, temperature=0.7, reference=reference, offload=True).run(groups)
    assert places == [str(setup.strategy.device), "cpu"]
    assert all(item.reference_log_probs is not None for group in done for item in group.items)
