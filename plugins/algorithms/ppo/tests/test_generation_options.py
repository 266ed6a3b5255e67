"""`**generate_kwargs`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import UserInputError
from rlhf_core.types import SamplingParams
from rlhf_ppo.generation_options import KNOWN, sampling_params


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SamplingParams()),
        ({"max_length": 100}, SamplingParams(max_new_tokens=100, max_length=100)),
        ({"max_length": 100, "max_new_tokens": 7}, SamplingParams(max_new_tokens=7, max_length=100)),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9}, SamplingParams(temperature=0.5, top_k=3, top_p=0.9)),
        ({"temperature": 0.5, "do_sample": False}, SamplingParams(greedy=True)),
        ({"top_k": None, "top_p": None, "temperature": None}, SamplingParams()),
        ({"stop": "7"}, SamplingParams(stop=("7",))),
        ({"stop": ["7", "8"]}, SamplingParams(stop=("7", "8"))),
        ({"stop_token_ids": 11}, SamplingParams(stop=("7",))),
        ({"stop_token_ids": [11, 12]}, SamplingParams(stop=("78",))),
        ({"stop_token_ids": [[11], [12, 2]]}, SamplingParams(stop=("7", "8<eos>"))),
    ],
)
def test_options(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], expected: SamplingParams) -> None:
    assert sampling_params(options, tokenizer) == expected


def test_an_unknown_option_names_the_known_ones(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserInputError) as caught:
        sampling_params({"temprature": 0.5}, tokenizer)
    assert 'did you mean "temperature"?' in str(caught.value)
    assert all(name in str(caught.value) for name in KNOWN)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"max_length": 0}]
)
def test_bounds(tokenizer: PreTrainedTokenizerBase, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserInputError, match=next(iter(wrong))):
        sampling_params(wrong, tokenizer)
