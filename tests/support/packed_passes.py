"""Tiny models, and the log-probs and gradients of their packed and padded passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_core.models.forward_passes import applying
from rlhf_core.types import Experience
from rlhf_forward.forward import policy_forward
from rlhf_passes.fast_passes import FastPasses
from rlhf_passes.packing import packed_attention

VOCABULARY = 23
LAYERS = 2


def build(model_type: str = "llama", **changed: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "pad_token_id": 0,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    config = AutoConfig.for_model(model_type, **{**options, **changed})
    return AutoModelForCausalLM.from_config(config).eval()


def run(model: nn.Module, experience: Experience, *, packed: bool) -> list[Tensor]:
    """Log-probs, entropies and all gradients of a sum in which no two tokens weigh the same."""
    model.zero_grad()
    with packed_passes(model) if packed else nullcontext():
        output = policy_forward(model, experience, 0.7, with_entropy=True)
        assert output.entropy is not None
        weights = torch.linspace(-1, 2, experience.action_mask.numel()).view_as(experience.action_mask)
        (output.log_probs * weights - 0.3 * output.entropy * weights.flip(0)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [output.log_probs.detach(), output.entropy.detach(), *gradients]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 2
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def packed_passes(*models: Any) -> AbstractContextManager[None]:
    """Packed rows, and nothing else that is faster."""
    return applying(FastPasses(), packed_attention(*models))
