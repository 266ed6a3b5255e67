"""oneDNN's products are those of a plain Linear, forward and backward, and only where they are meant to be."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import psutil
import pytest
import torch
from running import PATIENCE_SECONDS
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_passes import fast_linear as module
from rlhf_passes.fast_linear import fast_linears, multiply


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Small products go this way, too; the shapes of those that did."""
    calls: list[tuple[int, ...]] = []
    apply = module._Linear.apply

    def counting(inputs: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(inputs.shape))
        return apply(inputs, *rest)

    monkeypatch.setattr(module._Linear, "apply", counting)
    monkeypatch.setattr(module, "MIN_MULTIPLICATIONS", 500)
    monkeypatch.setattr(module, "uses_onednn", lambda: True)
    return calls


def _run(layer: nn.Module, inputs: torch.Tensor, *, fast: bool, recomputed: bool = False) -> list[torch.Tensor]:
    layer.zero_grad()
    given = inputs.clone().requires_grad_()
    with fast_linears(layer) if fast else nullcontext():
        output = checkpoint(layer, given, use_reentrant=False) if recomputed else layer(given)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    return [output.detach(), given.grad, *gradients]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(40, 24), (2, 20, 24), (2, 2, 10, 24)])
def test_outputs_and_gradients_are_those_of_a_linear(bias: bool, shape: tuple[int, ...], counted: list) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 17, bias=bias)
    inputs = torch.randn(shape)
    plain = _run(layer, inputs, fast=False)
    assert not counted
    fast = _run(layer, inputs, fast=True)
    assert counted == [(40, 24)]
    assert len(fast) == len(plain) == 3 + bias
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_repeats_it(counted: list) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
    inputs = torch.randn(50, 16)
    expected = _run(block, inputs, fast=False)
    found = _run(block, inputs, fast=True, recomputed=True)
    assert len(counted) == 4
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_is_frozen_gets_no_gradient() -> None:
    layer = nn.Linear(24, 17)
    layer.weight.requires_grad_(False)
    found = _run(layer, torch.randn(40, 24), fast=True)
    assert len(found) == 3 and layer.weight.grad is None and layer.bias.grad is not None


def test_strided_inputs(counted: list) -> None:
    layer = nn.Linear(24, 40, bias=False)
    layer.weight.data = torch.randn(24, 40).T
    inputs = torch.randn(24, 50).T
    with fast_linears(layer):
        found = layer(inputs)
    assert counted
    expected = inputs @ layer.weight.T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(multiply(inputs, layer.weight.detach().T), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_autocast_are_left_alone(dtype: torch.dtype, counted: list) -> None:
    typed, single = nn.Linear(24, 40, dtype=dtype), nn.Linear(24, 40)
    inputs = torch.randn(50, 24)
    with fast_linears(typed, single):
        assert typed(inputs.to(dtype)).dtype is dtype
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert single(inputs).dtype is torch.bfloat16
    assert not counted


def test_small_products_and_other_tensors_are_left_alone(counted: list) -> None:
    class Clever(torch.Tensor):
        pass

    class Own(nn.Linear):
        pass

    small, large, own = nn.Linear(10, 3), nn.Linear(24, 40), Own(24, 40)
    with fast_linears(small, large, own):
        small(torch.randn(2, 10))
        large(torch.randn(50, 24).as_subclass(Clever))
        own(torch.randn(50, 24))
    assert not counted


def test_modules_are_themselves_again(counted: list) -> None:
    layer = nn.Linear(24, 40)
    with pytest.raises(ZeroDivisionError), fast_linears(nn.Sequential(layer)):
        assert "forward" in vars(layer)
        raise ZeroDivisionError
    assert "forward" not in vars(layer)


def test_elsewhere_a_linear_is_itself(monkeypatch: pytest.MonkeyPatch, counted: list) -> None:
    monkeypatch.setattr(module, "uses_onednn", lambda: False)
    layer = nn.Linear(24, 40)
    with fast_linears(layer):
        layer(torch.ones(50, 24))
    assert not counted


@pytest.mark.skipif(not hasattr(psutil, "heap_info"), reason="measuring the heap needs psutil 7.2")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_shapes_seen() -> None:
    """In a process of its own: torch and oneDNN kept 1.7 MB for each of the first 1,024 shapes."""
    measure = """
from rlhf_core.util.host_memory import set_up_host_memory

set_up_host_memory()

import psutil
import torch
from rlhf_passes import fast_linear
from rlhf_passes.fast_linear import multiply

fast_linear.uses_onednn = lambda: True

def taken():
    heap = psutil.heap_info()
    return (heap.heap_used + heap.mmap_used) / 2**20

def products(shapes):
    for tokens in shapes:
        multiply(torch.randn(tokens, 128), weight)

torch.set_num_threads(1)
weight = torch.randn(128, 512)
products(range(1000, 1100))
before = taken()
products(range(600, 1000))
print(taken() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", measure], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert float(done.stdout) < 20  # of 222 without the bound
