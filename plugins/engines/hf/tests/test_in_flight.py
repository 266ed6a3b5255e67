"""Requests and weights that come between two decoding steps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from rlhf_core.protocols import InFlightEngine, SamplingRequest
from rlhf_core.types import Completion, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=16)
GREEDY = SamplingParams(max_new_tokens=5, greedy=True)


def changed(module: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = module.state_dict()
    return {name: each + 0.05 * torch.randn(each.shape, generator=generator) for name, each in weights.items()}


class Script:
    """What comes before which step, counted from 0: requests, or new weights."""

    def __init__(self, made: InFlightEngine, module: nn.Module) -> None:
        self._made = made
        self._module = module
        self.asked: dict[int, Sequence[SamplingRequest]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.step = -1

    def __call__(self) -> Sequence[SamplingRequest]:
        self.step += 1
        if (weights := self.weights.get(self.step)) is not None:
            version = self._made.policy_version + 1
            self._module.load_state_dict(weights)
            self._made.weights_updated(version)
        return self.asked.get(self.step, ())

    def run(self) -> dict[int, Completion]:
        found = list(self._made.generate_in_flight(self))
        assert len({each.sample_id for each in found}) == len(found)
        return {each.sample_id: each for each in found}


@pytest.fixture
def flight(model, engine):
    def start(family: str = "llama", **options: object) -> Script:
        module = model(family)
        return Script(engine(module, **options), module)

    return start


def tokens(found: dict[int, Completion]) -> dict[int, tuple[int, ...]]:
    return {key: each.token_ids for key, each in found.items()}


@pytest.mark.parametrize("family", ["llama", "mistral-window", "mamba"])
def test_requests_that_join_are_answered_as_they_would_be_alone(family, flight, model, engine, requests, collect):
    asked = requests(14, same=2)
    script = flight(family, max_batch_size=4)
    script.asked = {
        0: [(each, SAMPLING) for each in asked[:5]],
        3: [(each, SAMPLING) for each in asked[5:9]],
        6: [(each, GREEDY) for each in asked[9:12]],
        7: [(each, SAMPLING) for each in asked[12:]],
    }
    found = script.run()
    plain = engine(model(family))
    sampled = [each for each in asked if each not in asked[9:12]]
    assert tokens(found) == tokens({**collect(plain, sampled, SAMPLING), **collect(plain, asked[9:12], GREEDY)})
    assert all(not each.policy_versions for each in found.values())


def test_a_longer_one_than_the_cache_can_grow_to_waits_for_the_others(flight, requests, engine, model, collect):
    asked = requests(6)
    longer = SamplingParams(max_new_tokens=100)
    script = flight(max_batch_size=4, max_cache_tokens=256)
    script.asked = {0: [(each, SAMPLING) for each in asked[:4]], 2: [(each, longer) for each in asked[4:]]}
    found = script.run()
    plain = engine(model("llama"))
    assert tokens(found) == tokens({**collect(plain, asked[:4], SAMPLING), **collect(plain, asked[4:], longer)})


def test_answers_go_on_from_their_own_keys_and_values(packs, flight, model, requests):
    """After the change, a log-prob is of the new weights over what the old ones had computed of the text before."""
    asked = requests(6, same=3)
    script = flight()
    old, new = copy.deepcopy(script._module).eval(), model("llama").eval()
    weights = changed(old)
    new.load_state_dict(weights)
    script.asked = {0: [(each, SAMPLING) for each in asked]}
    script.weights = {4: weights}
    found = script.run()
    mixed = [each for each in found.values() if each.policy_versions]
    assert mixed
    # transformers 5.24 renamed it.
    name = "cache" if "cache" in inspect.signature(old.forward).parameters else "past_key_values"
    for answer in found.values():
        (request,) = [each for each in asked if each.sample_id == answer.sample_id]
        versions = answer.policy_versions or (answer.policy_version,) * len(answer.token_ids)
        assert versions == (0,) * min(4, len(versions)) + (1,) * (len(versions) - 4)
        assert answer.policy_version == 0
        cache, logits = DynamicCache(), []
        before: tuple[int, ...] = request.prompt_ids
        for token, version in zip(answer.token_ids, versions, strict=True):
            with torch.no_grad():
                output = [old, new][version](torch.tensor([before]), **{name: cache}, use_cache=True)
            logits.append(float(output.logits[0, -1].log_softmax(-1)[token]))
            before = (token,)
        assert answer.logprobs == pytest.approx(logits, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_answers_that_begin_after_a_change_owe_nothing_to_the_old_weights(
    family, flight, model, engine, requests, collect
):
    """Waiting rows of prompts that lie in a slot, or were prefilled ahead, included."""
    asked = requests(16, same=8)
    script = flight(family, max_batch_size=3)
    weights = changed(script._module)
    script.asked = {0: [(each, SAMPLING) for each in asked]}
    script.weights = {3: weights}
    found = script.run()
    module = model(family)
    module.load_state_dict(weights)
    expected = collect(engine(module), asked, SAMPLING)
    later = {key: each for key, each in found.items() if each.policy_version == 1}
    assert len(later) >= 8
    assert tokens(later) == {key: expected[key].token_ids for key in later}


def test_the_module_is_as_it_was_between_two_steps(packs, flight, requests):
    script = flight()
    script._module.train()
    seen = []

    def between() -> Sequence[SamplingRequest]:
        seen.append((script._module.training, torch.is_grad_enabled()))
        return script()

    script.asked = {0: [(each, SAMPLING) for each in requests(3)]}
    assert len(list(script._made.generate_in_flight(between))) == 3
    assert len(seen) > 3 and set(seen) == {(True, True)}


@pytest.mark.parametrize("family", ["llama", "mistral-window", "mamba"])
def test_canceled_requests_yield_nothing_and_the_others_what_they_would(
    family, flight, model, engine, requests, collect
):
    """Some are sampled when they are canceled, some wait, and one is the last that shares its prompt."""
    asked = requests(14, same=2)
    script = flight(family, max_batch_size=4)
    script.asked = {0: [(each, SAMPLING) for each in asked[:10]], 5: [(each, SAMPLING) for each in asked[10:]]}
    expected = collect(engine(model(family)), asked, SAMPLING)
    longest = sorted(asked[:4], key=lambda each: -len(expected[each.sample_id].token_ids))[:2]
    gone = {each.sample_id for each in (*longest, *asked[6:9], asked[13])}

    def between() -> Sequence[SamplingRequest]:
        found = script()
        if script.step == 3:
            for sample_id in gone - {asked[13].sample_id}:
                script._made.cancel(sample_id)
        elif script.step == 5:
            script._made.cancel(asked[13].sample_id)  # which is not known yet
        elif script.step == 6:
            script._made.cancel(asked[13].sample_id)
        return found

    found = {each.sample_id: each for each in script._made.generate_in_flight(between)}
    assert tokens(found) == {key: each.token_ids for key, each in expected.items() if key not in gone}


def test_a_generation_ends_when_all_is_canceled(flight, requests):
    (asked,) = requests(1)
    script = flight()
    script.asked = {0: [(asked, SamplingParams(max_new_tokens=100))]}

    def between() -> Sequence[SamplingRequest]:
        found = script()
        if script.step == 2:
            script._made.cancel(asked.sample_id)
        return found

    assert list(script._made.generate_in_flight(between)) == [] and script.step == 2
