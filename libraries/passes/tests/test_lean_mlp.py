"""A lean gated MLP computes what the model's own does, bit for bit, and keeps two of four intermediate results."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from rlhf_forward.architectures import with_trait
from rlhf_passes.fast_passes import fast_passes
from rlhf_passes.lean_blocks import lean_mlps
from rlhf_testing.models import tiny_model

HIDDEN, INTERMEDIATE, TOKENS = 16, 40, 30
MODEL_TYPES = {
    "GemmaMLP": "gemma",
    "GraniteMLP": "granite",
    "LlamaMLP": "llama",
    "MistralMLP": "mistral",
    "Olmo2MLP": "olmo2",
    "OlmoMLP": "olmo",
    "Qwen2MLP": "qwen2",
    "Qwen3MLP": "qwen3",
    "SmolLM3MLP": "smollm3",
}


def build(name: str = "LlamaMLP", **changed: object) -> nn.Module:
    torch.manual_seed(0)
    model_type = MODEL_TYPES[name]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": 2}
    config = AutoConfig.for_model(model_type, **sizes, **changed)
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    return getattr(module, name)(config)


def run(mlp: nn.Module, *, lean: bool, recomputed: bool = False) -> tuple[list[Tensor], int]:
    """Output and all gradients, and the number of [tokens, intermediate] tensors kept for the backward pass."""
    mlp.zero_grad()
    given = torch.linspace(-2, 2, TOKENS * HIDDEN).view(1, TOKENS, HIDDEN).requires_grad_()
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() == TOKENS * INTERMEDIATE:
            kept.add(tensor.data_ptr())
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with lean_mlps(mlp) if lean else nullcontext():
        with nullcontext() if recomputed else saved:
            output = checkpoint(mlp, given, use_reentrant=False) if recomputed else mlp(given)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = [p.grad.clone() for p in mlp.parameters() if p.grad is not None]
    return [output.detach(), given.grad, *gradients], len(kept)


def test_every_class_is_tested() -> None:
    assert set(MODEL_TYPES.values()) == with_trait("gated-mlp")


@pytest.mark.parametrize("name", sorted(MODEL_TYPES))
def test_outputs_and_gradients_are_the_same_and_half_is_kept(name: str) -> None:
    mlp = build(name)
    plain, kept = run(mlp, lean=False)
    assert kept == 4
    found, kept = run(mlp, lean=True)
    assert kept == 2
    assert len(found) == len(plain) == 5
    for ours, theirs in zip(found, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_biases_get_their_gradients() -> None:
    mlp = build(mlp_bias=True)
    plain, found = run(mlp, lean=False)[0], run(mlp, lean=True)[0]
    assert len(found) == len(plain) == 8
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_gradient_checkpointing_repeats_it() -> None:
    mlp = build()
    plain, found = run(mlp, lean=False)[0], run(mlp, lean=True, recomputed=True)[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))


def test_what_is_frozen_gets_no_gradient() -> None:
    mlp = build()
    mlp.down_proj.weight.requires_grad_(False)
    plain, found = run(mlp, lean=False)[0], run(mlp, lean=True)[0]
    assert mlp.down_proj.weight.grad is None and len(found) == 4
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))


def test_other_projections_types_and_autocast_are_left_alone() -> None:
    class Adapted(nn.Linear):
        pass

    adapted, watched, double = build(), build(), build().double()
    adapted.down_proj = Adapted(INTERMEDIATE, HIDDEN, bias=False)
    seen: list[int] = []
    watched.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(1))
    assert run(adapted, lean=True)[1] == 4
    assert run(watched, lean=True)[1] == 4 and seen
    mlp = build()
    with lean_mlps(mlp, double):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert mlp(torch.ones(3, HIDDEN)).dtype is torch.bfloat16
        assert double(torch.ones(3, HIDDEN, dtype=torch.float64)).dtype is torch.float64


def test_modules_are_themselves_again() -> None:
    mlp = build()
    with pytest.raises(ZeroDivisionError), lean_mlps(nn.Sequential(mlp)):
        assert "forward" in vars(mlp)
        raise ZeroDivisionError
    assert "forward" not in vars(mlp)


@pytest.mark.parametrize("is_large", [False, True])
def test_passes_of_large_models_only_keep_less(monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    monkeypatch.setattr("rlhf_passes.fast_passes.fills_host_memory", lambda device, parameters: is_large)
    model = tiny_model()
    with fast_passes(model):
        replaced = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert {"LlamaMLP", "LlamaRMSNorm"} <= replaced if is_large else not {"LlamaMLP", "LlamaRMSNorm"} & replaced
