"""`**generate_kwargs`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import UserInputError
from rlhf_core.types import SamplingParams
from rlhf_seed.generation import KNOWN, sampling_params, set_eos
from rlhf_testing.models import tiny_model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SamplingParams()),
        ({"max_length": 100}, SamplingParams(max_new_tokens=100, max_length=100)),
        (
            {"max_length": np.int64(100), "top_p": np.float32(0.5)},
            SamplingParams(max_new_tokens=100, max_length=100, top_p=0.5),
        ),
        ({"max_length": 100, "max_new_tokens": 7}, SamplingParams(max_new_tokens=7, max_length=100)),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9}, SamplingParams(temperature=0.5, top_k=3, top_p=0.9)),
        ({"temperature": 0.5, "do_sample": False}, SamplingParams(greedy=True)),
        (dict.fromkeys(KNOWN), SamplingParams()),
        (
            {"max_length": 512, "top_k": 50, "do_sample": True},
            SamplingParams(max_new_tokens=512, max_length=512, top_k=50),
        ),
        ({"eos_token_id": 2}, SamplingParams()),
        ({"pad_token_id": 1, "use_cache": 1, "early_stopping": 1}, SamplingParams()),
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
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": 0},
        {"temperature": "1"},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_length": 0},
        {"max_length": 1.5},
        {"max_new_tokens": "8"},
    ],
)
def test_bounds(tokenizer: PreTrainedTokenizerBase, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserInputError, match=next(iter(wrong))):
        sampling_params(wrong, tokenizer)


def test_stop_tokens_need_a_tokenizer() -> None:
    assert sampling_params({"stop": "7"}, None).stop == ("7",)
    with pytest.raises(UserInputError, match="stop_token_ids needs a tokenizer"):
        sampling_params({"stop_token_ids": [7]}, None)


def test_engines_find_the_tokens_that_end_answers_on_the_model() -> None:
    model = tiny_model()
    before = model.generation_config.eos_token_id
    set_eos(model, None)
    assert model.generation_config.eos_token_id == before
    set_eos(model, (4, 5))
    assert model.generation_config.eos_token_id == [4, 5]
