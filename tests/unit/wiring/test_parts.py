"""The parts of a run: built at their first use, once, around one set of models, and closed together."""

from contextlib import closing

import pytest
from torch import nn

from rlhf_core.algorithm import RolloutAlgorithm
from rlhf_core.config.resolve import resolve
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.place import LocalPlace
from rlhf_core.wiring import RunInputs, RunParts, TrainerParts, build_strategy
from rlhf_testing.runs import tiny_run


def parts_of(changes=None):
    """As a maker has them, and the run's strategy."""
    resolved = resolve(tiny_run(changes))
    inputs, strategy = RunInputs(resolved), build_strategy(resolved)
    place = LocalPlace.like(strategy)
    return RunParts(inputs, place), strategy


def test_a_maker_answers_and_scores():
    with closing(parts_of({"algorithm": {"kl_coef": 0.1}})[0]) as parts:
        prompts = [parts.inputs.prompts.prompt(position) for position in range(2)]
        groups = list(parts.maker(HookRelay()).make(prompts))
    items = [item for group in groups for item in group.items]
    assert len(items) == 4
    assert all(item.reference_log_probs is not None and item.values is not None for item in items)


def test_each_part_is_built_once_and_at_its_first_use():
    parts, _ = parts_of()
    assert not {"engine", "scorer", "passes", "evaluator"} & vars(parts).keys()
    with closing(parts):
        parts.maker(HookRelay())
        assert parts.engine is parts.engine and parts.scorer is parts.scorer
        assert "evaluator" not in vars(parts)
        assert parts.evaluator is None, "the run does not evaluate"


def test_what_was_built_is_closed_newest_first(monkeypatch):
    parts, _ = parts_of({"eval": {"num_prompts": 2}})
    closed = []
    for name in ("engine", "scorer", "evaluator"):
        part = getattr(parts, name)
        end = part.close
        monkeypatch.setattr(part, "close", lambda name=name, end=end: (closed.append(name), end()))
    parts.close()
    assert closed[-2:] == ["scorer", "engine"]


def test_one_that_learns_from_a_dataset_has_no_passes():
    parts, _ = parts_of({"algorithm": {"name": "sft"}})
    assert not isinstance(parts.inputs.algorithm, RolloutAlgorithm)
    assert parts.passes is None and parts.pass_models.models.keys() == {"policy"}


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_the_reference_is_a_copy_or_the_policy_without_its_adapter(lora):
    parts, _ = parts_of({"model": {"lora": lora, "offload_reference": True}, "algorithm": {"kl_coef": 0.1}})
    context = parts.pass_models
    assert (context.models["reference"] is parts.models["policy"]) == (lora is not None)
    assert ("reference" in context.offloaded) == (lora is None)


def test_a_trainers_engine_shares_its_policy():
    resolved = resolve(tiny_run())
    strategy = build_strategy(resolved)
    strategy.setup()
    try:
        with closing(TrainerParts(RunInputs(resolved), strategy)) as parts:
            assert parts.trained.keys() == {"policy", "critic"}
            assert parts.publish == parts.engine.weights_updated
            assert parts.place is strategy
    finally:
        strategy.teardown()


def test_a_critic_of_an_algorithms_own_draws_nothing(monkeypatch):
    parts, _ = parts_of()
    critic = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    monkeypatch.setattr(type(parts.inputs.algorithm), "build_critic", lambda self, policy: critic)
    with closing(parts):
        assert parts.models["critic"][1].p == 0.0
