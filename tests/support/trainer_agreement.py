"""The trainer's log-probs of sampled answers next to the engine's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from rlhf_core.types import Experience
from rlhf_forward import policy_forward


def assert_trainer_agrees(module: nn.Module, batch: Experience, temperature: float) -> None:
    """Compare log-probs, also of fewer actions, and check that gradients and entropy are finite."""
    output = policy_forward(module, batch, temperature, with_entropy=True)
    torch.testing.assert_close(output.log_probs, batch.action_log_probs, rtol=0, atol=2e-5)
    fewer = batch.action_mask & (torch.arange(batch.action_mask.shape[1]) != 1)  # as after a correction
    partly = policy_forward(module, replace(batch, action_mask=fewer), temperature).log_probs
    torch.testing.assert_close(partly[fewer], batch.action_log_probs[fewer], rtol=0, atol=2e-5)
    output.log_probs.sum().backward()
    assert all(torch.isfinite(each.grad).all() for each in module.parameters() if each.grad is not None)
    assert output.entropy is not None and torch.isfinite(output.entropy).all()
