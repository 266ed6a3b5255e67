"""Continuous batching: who waits for whom, what is computed twice, and how much room it takes."""

from __future__ import annotations

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_hf.running_batch import RunningBatch
from rlhf_hf.slot_model import SlotModel
from rlhf_hf.slots import SlotBatch, plan_prefill
from rlhf_testing.models import tiny_tokenizer


def start(made, asked, sampling) -> RunningBatch:
    """The rows of a generate call, to look inside."""
    flight = made.begin(asked, sampling)
    assert isinstance(flight.begin(), SlotBatch)
    return flight


def drain(flight) -> list:
    rows = []
    while flight.is_busy:
        rows.extend(flight.step())
    return rows


@pytest.fixture
def steps(monkeypatch):
    """The rows of each decoding pass."""
    counts: list[int] = []
    decode = SlotModel.decode

    def counting(self, token_ids, lengths):
        counts.append(len(token_ids))
        return decode(self, token_ids, lengths)

    monkeypatch.setattr(SlotModel, "decode", counting)
    return counts


def with_limits(limits: list[int], max_length: int = 60) -> list[GenerationRequest]:
    """Requests that may sample exactly `limits` tokens: prompts of the length that leaves them."""
    return [
        GenerationRequest(
            sample_id=index, prompt_ids=tuple(5 + (index + place) % 30 for place in range(max_length - limit))
        )
        for index, limit in enumerate(limits)
    ]


@pytest.fixture
def endless(model):
    """A Llama that never ends an answer by itself."""
    module = model("llama")
    module.generation_config.eos_token_id = None
    return module


@pytest.fixture
def endless_engine(endless, engine):
    def make(**options):
        tokenizer = tiny_tokenizer("abc")
        tokenizer.eos_token = None
        return engine(endless, tokenizer, **options)

    return make


def test_a_long_answer_does_not_hold_the_others(endless_engine, steps):
    limits = [40] + [5] * 26
    sampling = SamplingParams(max_new_tokens=100, max_length=60)
    made = endless_engine(max_batch_size=4)
    assert made.path.name == "slots"
    steps.clear()
    order = [row.request.sample_id for row in drain(start(made, with_limits(limits), sampling))]
    assert order[-1] == 0
    # 26 short answers through the three other slots: 9 rounds of 4 steps run beside the one long answer.
    assert len(steps) == 39
    assert order[:-1] == list(range(1, 27))


def test_steps_stay_near_the_work(endless_engine, steps):
    limits = [3 + 7 * index % 41 for index in range(96)]
    sampling = SamplingParams(max_new_tokens=100, max_length=60)
    made = endless_engine(max_batch_size=16)
    assert made.path.name == "slots"
    steps.clear()
    rows = drain(start(made, with_limits(limits), sampling))
    assert sorted(len(row.token_ids) for row in rows) == sorted(limits)
    assert len(steps) <= sum(limits) / 16 * 1.15 + max(limits)


@pytest.mark.parametrize("max_batch_size", [3, 8, 64])
def test_a_shared_prompt_is_prefilled_once(max_batch_size, model, engine, requests):
    """Also when its samples enter one by one."""
    asked = requests(32, same=8)
    rows = drain(start(engine(model("llama"), max_batch_size=max_batch_size), asked, SamplingParams(max_new_tokens=30)))
    prompts = {request.prompt_ids for request in asked}
    assert sum(row.num_computed for row in rows) == sum(map(len, prompts))


@pytest.mark.slow
def test_waiting_prompts_are_passed_many_at_once_where_the_cache_has_room(endless_engine, monkeypatch, collect):
    calls: list[int] = []
    prefill = SlotModel.prefill

    def counting(self, prompts):
        calls.append(len(prompts))
        return prefill(self, prompts)

    asked, sampling = with_limits([3 + 5 * index % 17 for index in range(96)]), SamplingParams(max_new_tokens=100)
    monkeypatch.setattr(SlotModel, "prefill", counting)
    roomy, narrow = (endless_engine(max_batch_size=16, max_cache_tokens=128 * slots) for slots in (24, 16))
    answers, passes = collect(roomy, asked, sampling), len(calls)
    assert sum(calls) >= 96  # a few more: the engine tries its way at first
    calls.clear()
    again = collect(narrow, asked, sampling)
    assert {key: answer.token_ids for key, answer in again.items()} == {
        key: answer.token_ids for key, answer in answers.items()
    }
    assert passes <= 0.6 * len(calls)
    batch = start(roomy, asked, sampling).begin()
    assert (batch._model.num_slots, batch._num_ahead) == (16, 8)


@pytest.mark.slow
def test_slots_and_cache_are_bounded(endless_engine, requests):
    made = endless_engine(max_batch_size=64, max_cache_tokens=640)
    asked = requests(30)
    flight = start(made, asked, SamplingParams(max_new_tokens=100))
    batch = flight.begin()
    # The longest sequence may have 111 tokens, seven blocks of 16: five slots fit.
    assert batch._model.num_slots == 5
    most = 0
    while flight.is_busy:
        flight.step()
        keys = batch._model.cache.layers[0].keys
        most = max(most, keys.shape[0] * keys.shape[2])
    assert 0 < most <= 640


def test_a_cache_too_small_for_one_sequence_is_an_error(endless_engine, requests):
    made = endless_engine(max_cache_tokens=64)
    with pytest.raises(ConfigError, match="max_cache_tokens to 96"):
        made.generate(requests(9), SamplingParams(max_new_tokens=80))


def test_completions_come_as_soon_as_they_are_done(endless_engine):
    answers = endless_engine(max_batch_size=4).generate(
        with_limits([30, 2, 9, 2]), SamplingParams(max_new_tokens=100, max_length=60)
    )
    assert [answer.sample_id for answer in answers] == [1, 3, 2, 0]


@pytest.mark.parametrize("max_tokens", [1, 64, 300])
def test_prefill_batches_hold_every_prompt_once_with_little_padding(max_tokens):
    lengths = [1 + 37 * index % 90 for index in range(80)]
    groups = plan_prefill(lengths, max_tokens)
    assert sorted(index for group in groups for index in group) == list(range(80))
    for group in groups:
        padded = len(group) * max(lengths[index] for index in group)
        assert len(group) == 1 or padded <= max_tokens
        assert padded - sum(lengths[index] for index in group) <= max(128, 0.15 * padded)
