"""The algorithm under options, and episodes made by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.components import AlgorithmContext
from rlhf_core.plugins.selected import load
from rlhf_core.types import Experience, SamplingParams
from rlhf_forward import mask_from_lengths
from rlhf_testing.models import CHARACTERS, tiny_tokenizer

sys.path.append(str(Path(__file__).parent))  # for teaching.py


def make_algorithm(options: dict[str, Any] | None = None, *, samples_per_prompt: int = 2) -> Any:
    selected = load("algorithms", "distill")
    given = {"teacher": {"path": "builtin:tiny-digits"}, **(options or {})}
    context = AlgorithmContext(
        sampling=SamplingParams(max_new_tokens=8), samples_per_prompt=samples_per_prompt, tokenizer=tiny_tokenizer()
    )
    return selected.build(selected.component.config.model_validate(given), context)


def make_episode(lengths: list[int], **fields: Any) -> Experience:
    """Answers of these lengths after prompts of two tokens, two to a prompt; drawn from a seed."""
    mask = mask_from_lengths(torch.tensor(lengths), max(lengths))
    draw = torch.Generator().manual_seed(0)
    attention = torch.cat([torch.ones(len(lengths), 2, dtype=torch.bool), mask], dim=1)
    tokens = torch.randint(3, 15, attention.shape, generator=draw)
    given: dict[str, Any] = {
        "action_log_probs": -torch.rand(mask.shape, generator=draw),
        "scores": torch.rand(len(lengths), generator=draw),
        **fields,
    }
    return Experience(
        sequences=torch.where(attention, tokens, 0),
        attention_mask=attention,
        action_mask=mask,
        sample_ids=torch.arange(len(lengths)),
        group_ids=torch.arange(len(lengths)) // 2,
        policy_versions=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        **given,
    )


@pytest.fixture
def algorithm() -> Any:
    """algorithm(options, samples_per_prompt=2)."""
    return make_algorithm


@pytest.fixture
def episode() -> Any:
    """episode(lengths, **fields)."""
    return make_episode


def pair_tokenizer() -> Any:
    """A tokenizer of the same characters as `tiny_tokenizer` with other ids, and tokens for 12, 31, 23."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    known = ["<eos>", "<pad>", "<unk>", *reversed(CHARACTERS), "12", "31", "23"]
    merges = [("1", "2"), ("3", "1"), ("2", "3")]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(known)}, merges, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def pairs() -> Any:
    return pair_tokenizer()
