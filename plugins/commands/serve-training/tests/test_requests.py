"""Requests for samples against the limits."""

import math
from types import SimpleNamespace

import pytest
from tinker import types

from rlhf_serve_training.limits import Limits
from rlhf_serve_training.requests import ModelFacts, sample_order
from rlhf_serve_training.wire import InvalidRequest

FACTS = ModelFacts(32, 64, {2}, SimpleNamespace(decode=lambda ids, **options: "x"))


def order(num_samples=1, limits=None, **params):
    message = types.SampleRequest(
        sampling_session_id="s",
        seq_id=1,
        num_samples=num_samples,
        prompt=types.ModelInput.from_ints([5, 6, 7, 8]),
        sampling_params=types.SamplingParams(**params),
    )
    return sample_order(message, "s:1", FACTS, limits or Limits())


def test_samples_fill_the_context_or_the_limit_of_a_request():
    assert order(2).works[0].max_tokens == 60
    assert order(2, Limits(request_tokens=30)).works[0].max_tokens == 15
    assert order(2, max_tokens=100).works[0].max_tokens == 60


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 20}, "2 samples of 20 tokens are more than 30 tokens"),
        ({"max_tokens": 0}, "max_tokens is at least 1"),
        ({"max_tokens": 5, "temperature": math.nan}, "temperature is at least 0"),
        ({"max_tokens": 5, "temperature": math.inf}, "temperature is at least 0"),
        ({"max_tokens": 5, "stop": ["y"] * 65}, "65 stop sequences"),
        ({"max_tokens": 5, "stop": ["y" * 2000]}, "between 1 and 1024 characters"),
        ({"max_tokens": 5, "stop": [99]}, "the token 99 does not exist"),
    ],
)
def test_refuses_by_name(params, message):
    with pytest.raises(InvalidRequest, match=message):
        order(2, Limits(request_tokens=30), **params)
