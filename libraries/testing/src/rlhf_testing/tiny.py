"""The tiny policy of the engine and algorithm contracts: float32, created in code, far from uniform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_core.columns import Columns
from rlhf_core.types import BufferItem, Completion, Experience

from .models import tiny_model, tiny_tokenizer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?+="
NUM_SPECIAL = 4
EOS_ID = 2


def contract_tokenizer() -> PreTrainedTokenizerBase:
    """Create a tokenizer with one token per character, plus 4 special tokens."""
    return tiny_tokenizer(CHARACTERS)


def contract_policy(*, seed: int = 0, hidden_size: int = 32) -> PreTrainedModel:
    """Create a Llama with two small layers, two heads and large weights, so that its distributions are far from
    uniform.
    """
    import torch

    model = tiny_model(contract_tokenizer(), seed=seed, hidden_size=hidden_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def perturb(model: nn.Module, *, seed: int, scale: float = 0.05) -> None:
    """Change every weight slightly, in place, to get another policy."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.add_(noise.to(parameter.device, parameter.dtype))


def as_experience(answers: Sequence[tuple[tuple[int, ...], Completion]]) -> Experience:
    """Collate prompts and their completions into a batch on the CPU."""
    import torch

    from rlhf_core.batching import collate

    items = []
    for prompt_ids, done in answers:
        support = None
        if done.support_ids is not None:
            width = max(len(kept) for kept in done.support_ids)
            rows = [[*kept, *([-1] * (width - len(kept)))] for kept in done.support_ids]
            support = torch.tensor(rows, dtype=torch.int32)
        items.append(
            BufferItem(
                sample_id=done.sample_id,
                group_id=0,
                policy_version=done.policy_version,
                prompt_ids=torch.tensor(prompt_ids),
                response_ids=torch.tensor(done.token_ids),
                action_mask=torch.ones(len(done.token_ids), dtype=torch.bool),
                action_log_probs=torch.tensor(done.logprobs),
                support_ids=support,
                columns=done.columns if isinstance(done.columns, Columns) else Columns(),
            )
        )
    return collate(items)
