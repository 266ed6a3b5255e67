"""A tokenizer of digits."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_core.models.builtin import build_character_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_character_tokenizer("0123456789>,")
