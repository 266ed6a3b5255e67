"""What ends an answer, and what belongs to it."""

from __future__ import annotations

import pytest

from rlhf_core.errors import DataError, DivergenceError
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_testing.models import tiny_tokenizer

EOS = 2


def test_eos_is_part_of_the_answer_and_nothing_follows(model, engine, requests, collect):
    answers = collect(engine(model("llama")), requests(64), SamplingParams(max_new_tokens=60))
    assert {answer.finish_reason for answer in answers.values()} == {"stop", "length"}
    for answer in answers.values():
        assert len(answer.token_ids) == len(answer.logprobs) >= 1
        assert EOS not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == EOS) == (answer.finish_reason == "stop")
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == 60


def test_pad_may_equal_eos(model, engine, requests, collect):
    """The pad token of a tokenizer without one is its EOS: real EOS stay, and nothing else changes."""
    tokenizer = tiny_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?")
    tokenizer.pad_token = tokenizer.eos_token
    module, sampling = model("llama"), SamplingParams(max_new_tokens=40)
    assert collect(engine(module, tokenizer), requests(20), sampling) == collect(engine(module), requests(20), sampling)


def test_every_eos_of_the_generation_config_ends_an_answer(model, engine, requests, collect):
    module = model("llama")
    module.generation_config.eos_token_id = [7, 9]
    answers = collect(engine(module), requests(64), SamplingParams(max_new_tokens=60))
    assert {a.token_ids[-1] for a in answers.values() if a.finish_reason == "stop"} == {EOS, 7, 9}


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_stop_text_ends_the_answer_and_is_kept(family, model, engine, requests, collect):
    tokenizer = tiny_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?")
    module, asked = model(family), requests(32)
    free = collect(engine(module, tokenizer), asked, SamplingParams(max_new_tokens=40))
    texts = {key: tokenizer.decode(answer.token_ids) for key, answer in free.items()}
    stop = next(text[4:6] for text in texts.values() if len(text) > 8 and "<" not in text[:6])
    ended = collect(engine(module, tokenizer), asked, SamplingParams(max_new_tokens=40, stop=(stop, "never seen")))
    for key, answer in ended.items():
        place = texts[key].find(stop)
        # One character a token, as long as no special token comes before the stop text.
        if place < 0:
            # Other rows left the batch earlier, which may change the last bits of a sum, never a token.
            assert (answer.token_ids, answer.finish_reason) == (free[key].token_ids, free[key].finish_reason)
            assert answer.logprobs == pytest.approx(free[key].logprobs, abs=1e-5)
        else:
            text = tokenizer.decode(answer.token_ids)
            assert text.endswith(stop) and text.count(stop) == 1
            assert answer.finish_reason == "stop"
            assert answer.token_ids == free[key].token_ids[: len(answer.token_ids)]
    assert ended != free


def test_a_stop_text_in_the_prompt_does_not_count(model, engine, requests, collect):
    tokenizer = tiny_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?")
    request = GenerationRequest(sample_id=3, prompt_ids=tuple(tokenizer.encode("abab")))
    sampling = SamplingParams(max_new_tokens=10)
    free = collect(engine(model("llama"), tokenizer), [request], sampling)[3]
    first = tokenizer.decode(free.token_ids[:1])
    stop = SamplingParams(max_new_tokens=10, stop=(f"b{first}",))
    assert collect(engine(model("llama"), tokenizer), [request], stop)[3] == free


def test_max_length_counts_prompt_and_answer(model, engine, requests, collect):
    asked = requests(9)
    answers = collect(engine(model("llama")), asked, SamplingParams(max_new_tokens=50, max_length=14))
    for request in asked:
        answer = answers[request.sample_id]
        total = len(request.prompt_ids) + len(answer.token_ids)
        assert total == 14 if answer.finish_reason == "length" else total <= 14


@pytest.mark.parametrize("family", ["gpt2", "mistral-window"])
def test_the_models_positions_bound_an_answer(family, model, engine, requests, collect):
    asked = requests(6)
    answers = collect(engine(model(family)), asked, SamplingParams(max_new_tokens=1000))
    for request in asked:
        assert len(request.prompt_ids) + len(answers[request.sample_id].token_ids) <= 128


@pytest.mark.parametrize(
    ("prompt", "message"), [((), "is empty"), (tuple(range(4, 14)), "leaves no room"), ((5,) * 200, "leaves no room")]
)
def test_a_prompt_without_room_is_an_error_at_once(prompt, message, model, engine):
    sampling = SamplingParams(max_new_tokens=4, max_length=10)
    with pytest.raises(DataError, match=f"sample 8: .*{message}"):
        engine(model("llama")).generate([GenerationRequest(sample_id=8, prompt_ids=prompt)], sampling)


def test_no_request_no_completion(model, engine):
    assert list(engine(model("llama")).generate([], SamplingParams())) == []


@pytest.mark.parametrize("greedy", [False, True])
def test_weights_that_are_not_finite_are_named(greedy, model, engine, requests):
    made = engine(model("llama"))
    assert made.path.name == "slots"
    made._module.lm_head.weight.data[3] = float("nan")
    with pytest.raises(DivergenceError, match=r"optimizer\.lr"):
        list(made.generate(requests(3), SamplingParams(max_new_tokens=4, greedy=greedy)))
