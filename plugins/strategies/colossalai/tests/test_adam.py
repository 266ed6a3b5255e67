"""The Adam kernels in torch, against torch's own AdamW; and what they are needed for."""

from __future__ import annotations

import logging

import pytest
import torch

from rlhf_colossalai import adam
from rlhf_colossalai.adam import _TorchKernels, adam_update, ensure_kernels, make_hybrid_adam


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_update_is_torchs(weight_decay, decoupled):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    ours = [tensor.clone() for tensor in start]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind(theirs, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    averages = [torch.zeros_like(tensor) for tensor in ours]
    squares = [torch.zeros_like(tensor) for tensor in ours]
    for step in range(1, 4):
        grads = [torch.randn(tensor.shape, generator=generator) for tensor in ours]
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        reference.step()
        adam_update(
            ours,
            [grad * 4 for grad in grads],
            averages,
            squares,
            step=step,
            lr=0.01,
            betas=(0.8, 0.95),
            eps=1e-6,
            weight_decay=weight_decay,
            decoupled=decoupled,
            div_scale=4.0,
        )
    for tensor, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_bf16_gradients_in_host_memory_are_divided_by_the_scale():
    ensure_kernels(torch.device("cpu"))
    grad = torch.tensor([3.0, -5.0])
    moments = []
    for kind in (torch.float32, torch.bfloat16):
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = make_hybrid_adam([parameter], 0.1, (0.9, 0.99), 1e-8, 0.0)
        # Gemini's way to a gradient of another type than its (fp32) weight.
        parameter.data = grad.to(kind)
        parameter.grad = parameter.data
        parameter.data = torch.zeros(2)
        optimizer.step(div_scale=4.0)
        moments.append(optimizer.state[parameter]["exp_avg"])
    torch.testing.assert_close(moments[0], grad / 4.0 * 0.1)
    torch.testing.assert_close(moments[1], moments[0])


def test_a_kernel_that_does_not_build_is_replaced_and_said_once(monkeypatch, caplog):
    class Broken:
        name, priority = "broken", 1

        def is_available(self):
            return True

        def assert_compatible(self):
            pass

        def load(self):
            raise RuntimeError("nvcc: command not found\nmore")

    for loader in (adam.CPUAdamLoader, adam.FusedOptimizerLoader):
        monkeypatch.setattr(loader, "REGISTRY", [Broken])
    with caplog.at_level(logging.WARNING):
        ensure_kernels(torch.device("cuda"))
        ensure_kernels(torch.device("cuda"))
    assert [loader.REGISTRY for loader in (adam.CPUAdamLoader, adam.FusedOptimizerLoader)] == [[_TorchKernels]] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # one for each kernel
    assert all("nvcc: command not found" in line and "more" not in line for line in lines)
    assert adam.CPUAdamLoader().load().CPUAdamOptimizer is not None


def test_make_hybrid_adam_takes_what_is_trainable():
    ensure_kernels(torch.device("cpu"))
    trainable, frozen = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = make_hybrid_adam([trainable, frozen], 0.1, (0.9, 0.99), 1e-8, 0.0)
    assert optimizer.param_groups[0]["params"] == [trainable]
