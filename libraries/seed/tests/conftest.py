"""A tokenizer of digits."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_testing.models import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer("0123456789>,")
