"""The request option `temperature`: each request is sampled at its own, and says at which."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_core.errors import DataError
from rlhf_core.types import SamplingParams

RUN = SamplingParams(max_new_tokens=12, temperature=0.9)
TRUNCATED = replace(RUN, top_k=12, top_p=0.8)
OWN = [0.5, None, 1.5, 1.0, 2]


def at_own(asked):
    made = []
    for place, request in enumerate(asked):
        own = OWN[place % len(OWN)]
        made.append(request if own is None else replace(request, options={"temperature": own}))
    return made


@pytest.mark.parametrize("sampling", [RUN, TRUNCATED], ids=["whole", "truncated"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "mamba"])
@pytest.mark.slow_except("llama-truncated", "mistral-window-whole", "mamba-truncated")
def test_answers_are_those_of_an_engine_at_that_temperature(family, sampling, model, engine, requests, collect):
    module, asked = model(family), at_own(requests(15, same=3))
    together = collect(engine(module, max_batch_size=7), asked, sampling)
    plain = engine(module)
    for request in asked:
        own = request.options.get("temperature", sampling.temperature)
        alone = collect(plain, [replace(request, options={})], replace(sampling, temperature=own))[request.sample_id]
        answer = together[request.sample_id]
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert answer.support_ids == alone.support_ids
        assert not alone.columns
        expected = {"temperature": [own] * len(answer.token_ids)} if request.options else {}
        assert answer.columns == expected


def test_log_probs_are_those_of_float64(model, engine, requests, collect):
    module, asked = model("llama"), at_own(requests(15))
    answers = collect(engine(module), asked, RUN)
    exact = module.double().eval()
    for request in asked:
        answer, own = answers[request.sample_id], request.options.get("temperature", RUN.temperature)
        with torch.no_grad():
            logits = exact(torch.tensor([[*request.prompt_ids, *answer.token_ids]]), use_cache=False).logits[0]
        log_probs = (logits[len(request.prompt_ids) - 1 : -1] / own).log_softmax(-1)
        expected = log_probs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_requests_that_join_keep_their_temperature(model, engine, requests, collect):
    module, asked = model("llama"), at_own(requests(10))
    expected = collect(engine(module), asked, RUN)
    coming = [[(each, RUN) for each in part] for part in (asked[:4], (), asked[4:])]
    found = list(engine(module).generate_in_flight(lambda: coming.pop(0) if coming else ()))
    assert {each.sample_id: (each.token_ids, each.columns) for each in found} == {
        sample_id: (each.token_ids, each.columns) for sample_id, each in expected.items()
    }


def test_greedy_answers_have_no_temperature(model, engine, requests, collect):
    module, asked, greedy = model("llama"), requests(4), SamplingParams(max_new_tokens=8, greedy=True)
    plain = collect(engine(module), asked, greedy)
    warm = collect(engine(module), [replace(each, options={"temperature": 3.0}) for each in asked], greedy)
    assert warm == plain


@pytest.mark.parametrize("value", [0, -1.0, "1", True, float("inf"), float("nan")])
def test_a_temperature_that_is_none_is_refused(value, model, engine, requests):
    (request,) = requests(1)
    with pytest.raises(DataError, match="sample 1000: the option temperature is"):
        engine(model("llama")).generate([replace(request, options={"temperature": value})], RUN)
