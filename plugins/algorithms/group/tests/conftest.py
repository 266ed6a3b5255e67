"""Episodes made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from rlhf_core.components import AlgorithmContext
from rlhf_core.plugins.selected import load
from rlhf_core.types import Experience, SamplingParams
from rlhf_forward.masking import mask_from_lengths
from rlhf_testing.models import tiny_tokenizer

MAX_NEW_TOKENS = 8


def make_context(**changes: Any) -> AlgorithmContext:
    values: dict[str, Any] = {
        "sampling": SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
        "samples_per_prompt": 2,
        "tokenizer": tiny_tokenizer(),
    }
    return AlgorithmContext(**{**values, **changes})


def make_algorithm(name: str, options: Mapping[str, Any] | None = None, **context: Any) -> Any:
    selected = load("algorithms", name)
    config = selected.component.config.model_validate(dict(options or {}))
    return selected.build(config, make_context(**context))


def make_episode(
    scores: Sequence[float], groups: Sequence[int], lengths: Sequence[int], **per_token: torch.Tensor
) -> Experience:
    """Answers of these lengths after prompts of two tokens; `per_token` sets further [B, A] fields."""
    width = max(lengths)
    mask = mask_from_lengths(torch.tensor(lengths), width)
    prompt = torch.ones(len(scores), 2, dtype=torch.bool)
    attention = torch.cat([prompt, mask], dim=1)
    fields: dict[str, Any] = {"action_log_probs": torch.zeros(mask.shape), **per_token}
    return Experience(
        sequences=torch.where(attention, 5, 0),
        attention_mask=attention,
        action_mask=mask,
        sample_ids=torch.arange(len(scores)),
        group_ids=torch.tensor(groups),
        policy_versions=torch.zeros(len(scores), dtype=torch.int64),
        truncated=torch.tensor([length == MAX_NEW_TOKENS for length in lengths]),
        scores=torch.tensor(scores, dtype=torch.float32),
        **fields,
    )


@pytest.fixture
def algorithm() -> Callable[..., Any]:
    """algorithm(name, options, **changes of the context)."""
    return make_algorithm


@pytest.fixture
def episode() -> Callable[..., Experience]:
    """episode(scores, group ids, lengths, **[B, A] fields)."""
    return make_episode
