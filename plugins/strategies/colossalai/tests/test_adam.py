"""HybridAdam with torch's step, against torch's own AdamW."""

from __future__ import annotations

import pytest
import torch

from rlhf_colossalai.adam import RunHybridAdam


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_update_is_torchs(weight_decay):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    optimizer = RunHybridAdam(ours, 0.01, (0.8, 0.95), 1e-6, weight_decay)
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(own.shape, generator=generator)
            own.grad = other.grad * 4
        reference.step()
        optimizer.step(div_scale=4.0)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
        assert optimizer.state[own]["step"] == 3
        assert own.grad is None
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def test_bf16_gradients_in_host_memory_are_divided_by_the_scale():
    grad = torch.tensor([3.0, -5.0])
    moments = []
    for kind in (torch.float32, torch.bfloat16):
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = RunHybridAdam([parameter], 0.1, (0.9, 0.99), 1e-8, 0.0)
        # Gemini's way to a gradient of another type than its (fp32) weight.
        parameter.data = grad.to(kind)
        parameter.grad = parameter.data
        parameter.data = torch.zeros(2)
        optimizer.step(div_scale=4.0)
        moments.append(optimizer.state[parameter]["exp_avg"])
    torch.testing.assert_close(moments[0], grad / 4.0 * 0.1)
    torch.testing.assert_close(moments[1], moments[0])
