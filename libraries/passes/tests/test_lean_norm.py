"""A lean norm computes what the model's own does, bit for bit, and keeps nothing but its input."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from rlhf_passes.lean_blocks import lean_norms

TOKENS, HIDDEN = 30, 16


def run(norm: nn.Module, *, lean: bool, recomputed: bool = False) -> tuple[list[Tensor], int]:
    """Output and gradients, and the number of [tokens, hidden] tensors kept for the backward pass."""
    norm.zero_grad()
    given = torch.linspace(-2, 3, TOKENS * HIDDEN).view(1, TOKENS, HIDDEN).requires_grad_()
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() == given.numel():
            kept.add(tensor.data_ptr())
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with lean_norms(norm) if lean else nullcontext():
        with nullcontext() if recomputed else saved:
            output = checkpoint(norm, given, use_reentrant=False) if recomputed else norm(given)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = [p.grad.clone() for p in norm.parameters() if p.grad is not None]
    return [output.detach(), given.grad, *gradients], len(kept)


def build(kind: type[nn.Module] = LlamaRMSNorm) -> nn.Module:
    norm = kind(HIDDEN)
    nn.init.uniform_(norm.weight)
    return norm


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm])
def test_outputs_and_gradients_are_the_same(kind: type[nn.Module], recomputed: bool) -> None:
    norm = build(kind)
    (plain, before), (found, after) = run(norm, lean=False), run(norm, lean=True, recomputed=recomputed)
    assert len(found) == len(plain) == 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))
    assert recomputed or (before > 1 and after == 1)


def test_what_is_frozen_gets_no_gradient() -> None:
    norm = build().requires_grad_(False)
    (plain, _), (found, _) = run(norm, lean=False), run(norm, lean=True)
    assert len(found) == 2 and norm.weight.grad is None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))


def test_other_norms_and_types_are_left_alone() -> None:
    class OwnRMSNorm(LlamaRMSNorm):
        pass

    own, double = OwnRMSNorm(HIDDEN), build().double()
    with lean_norms(own, double):
        assert "forward" not in vars(own)
        assert double(torch.ones(3, HIDDEN, dtype=torch.float64)).dtype is torch.float64
    assert "forward" not in vars(double)
