"""Reference log-probs and values equal a direct forward, whatever the batches."""

import pytest
import torch

from rlhf_core.algorithm import GroupPass
from rlhf_core.batching import collate, plan_micro_batches
from rlhf_core.columns import Column
from rlhf_core.errors import PluginError
from rlhf_core.models.passes import GroupPasses
from rlhf_core.types import RolloutGroup
from rlhf_forward import model_passes
from rlhf_forward.forward import policy_forward, value_forward
from rlhf_testing.models import tiny_model
from rlhf_testing.samples import make_group


def passes(strategy, models, **options):
    return GroupPasses(strategy, models, lambda context: model_passes(context, models), **options)


@pytest.fixture
def groups():
    return [make_group(position, 2, num_actions=1 + position * 3 % 7) for position in range(6)]


@pytest.mark.parametrize("batch_tokens", [None, 1, 13, 30])
def test_equals_a_forward_of_each_sample_alone(setup, groups, batch_tokens):
    reference, critic = tiny_model(seed=9).eval(), setup.trained["critic"].model
    models = {"reference": reference, "critic": critic}
    scoring = passes(setup.strategy, models, temperature=0.7, batch_tokens=batch_tokens)
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
    scoring = passes(setup.strategy, {"critic": setup.trained["critic"].model})
    done = scoring.run([groups[0], empty, groups[1]])
    assert [len(group.items) for group in done] == [2, 0, 2]
    assert all(item.values is not None for group in done for item in group.items)
    assert scoring.run([]) == []


def test_without_models_nothing_is_added(setup, groups):
    assert passes(setup.strategy, {}).run(groups) == groups


def test_the_mode_of_the_model_comes_back(setup, groups):
    critic = setup.trained["critic"].model.train()
    passes(setup.strategy, {"critic": critic}).run(groups)
    assert critic.training


def test_an_offloaded_reference_is_on_the_device_for_its_pass_only(setup, groups, monkeypatch):
    reference, places = setup.trained["policy"].model, []
    monkeypatch.setattr(type(reference), "to", lambda self, device: places.append(str(device)))
    done = passes(setup.strategy, {"reference": reference}, offloaded={"reference"}).run(groups)
    assert places == [str(setup.strategy.device), "cpu"]
    assert all(item.reference_log_probs is not None for group in done for item in group.items)


@pytest.mark.parametrize(("num_parameters", "num_tokens"), [(49_000_000, 1024), (50_000_000, 192)])
def test_each_model_runs_in_batches_of_the_default_for_its_size(setup, groups, monkeypatch, num_parameters, num_tokens):
    reference, used = tiny_model(seed=9), []
    reference.extra = torch.nn.Parameter(torch.empty(1).expand(num_parameters), requires_grad=False)

    def bounded(items, max_tokens, price):
        used.append(max_tokens)
        return plan_micro_batches(items, max_tokens, price)

    monkeypatch.setattr("rlhf_core.models.forward_passes.plan_micro_batches", bounded)
    passes(setup.strategy, {"reference": reference, "critic": setup.trained["critic"].model}).run(groups)
    assert used == [num_tokens, 1024]


class Named(GroupPass):
    """Columns of each kind, of which it is told how many rows to give."""

    columns = {"novelty": Column(fill=-1.0), "level": Column(per="sample", dtype="int8")}

    def __init__(self, short=0):
        self.short = short
        self.versions = []

    def run(self, groups):
        items = [item for group in groups for item in group.items]
        made = [{"novelty": item.action_log_probs.tolist(), "level": item.sample_id} for item in items]
        return made[self.short :]

    def published(self, version):
        self.versions.append(version)


def test_columns_of_a_pass_are_those_it_declares(setup, groups):
    named = Named()
    done = GroupPasses(setup.strategy, {}, lambda context: [named])
    for item in (item for group in done.run(groups) for item in group.items):
        assert item.columns["novelty"].dtype == torch.float32 and item.columns["level"].dtype == torch.int8
        assert torch.equal(item.columns["novelty"], item.action_log_probs)
        assert (item.columns["level"].shape, int(item.columns["level"])) == ((), item.sample_id)
    done.published(3)
    assert named.versions == [3]


def test_a_pass_that_forgets_a_row_is_named(setup, groups):
    with pytest.raises(PluginError, match="Named: it returned 11 rows for 12 samples"):
        GroupPasses(setup.strategy, {}, lambda context: [Named(short=1)]).run(groups)


def test_a_column_that_it_does_not_declare_is_named(setup, groups):
    named = Named()
    named.columns = {"novelty": Column()}
    with pytest.raises(PluginError, match="no column 'level' is declared"):
        GroupPasses(setup.strategy, {}, lambda context: [named]).run(groups)
