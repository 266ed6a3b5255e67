"""Contract of a policy loss: per-token losses of rows that are independent of one another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import rlhf_forward
import rlhf_objective as objective

from .functions import FunctionContract

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_objective import PolicyLoss, PolicyLossInput

    Loss = Callable[[PolicyLossInput], PolicyLoss]


class PolicyLossContract(FunctionContract):
    """Tests of a policy loss. Subclass it and set `plugin`.

    The batch has six answers of different lengths, one of them fully masked. The policy moved a little or a lot.

    Example:
        class TestMyLoss(PolicyLossContract):
            plugin = "my-loss"
    """

    kind = "policy_losses"
    starts_as_policy_gradient: ClassVar[bool] = True
    """Whether, before the first step, the gradient with respect to each token's log-prob is minus its advantage."""
    rtol: ClassVar[float] = 1e-5

    @pytest.fixture(params=[0.05, 0.5, 5.0])
    @classmethod
    def batch(cls, request: pytest.FixtureRequest) -> PolicyLossInput:
        """A batch whose log-probs differ from the old ones by up to this much, in nats."""
        return _batch(request.param)

    def test_losses_are_numbers_of_the_tokens_that_count(self, function: Loss, batch: PolicyLossInput) -> None:
        import torch

        loss, shape = function(batch), tuple(batch.mask.shape)
        assert isinstance(loss, objective.PolicyLoss), f"must return a PolicyLoss, got a {type(loss).__name__}"
        for name, values in (("losses", loss.losses), ("ratio", loss.ratio)):
            assert values.shape == shape, f"{name} must have shape {shape}, got {tuple(values.shape)}"
            assert values.dtype == torch.float32, f"{name} must be float32, got {values.dtype}"
            assert bool(torch.isfinite(values[batch.mask]).all()), f"{name} must be finite"
        assert not loss.losses[~batch.mask].any(), "losses must be 0 outside the mask"
        assert not loss.ratio.requires_grad, "ratio is used for metrics and must be detached"
        for name, flags in (("clipped", loss.clipped), ("dual_clipped", loss.dual_clipped)):
            assert flags.dtype == torch.bool and flags.shape == shape, f"{name} must be bool of shape {shape}"
            assert not flags[~batch.mask].any(), f"{name} must be False outside the mask"

    def test_what_is_masked_reaches_no_gradient(self, function: Loss, batch: PolicyLossInput) -> None:
        """Values outside the mask (padding, a masked answer, an observation) must not affect the gradient."""
        import torch

        outside = ~batch.mask
        broken = replace(
            batch,
            log_probs=batch.log_probs.detach().masked_fill(outside, math.nan).requires_grad_(),
            old_log_probs=batch.old_log_probs.masked_fill(outside, -math.inf),
            advantages=batch.advantages.masked_fill(outside, math.nan),
        )
        expected, gradient = _gradient(function, batch), _gradient(function, broken)
        assert bool(torch.isfinite(gradient).all()), "NaN outside the mask affects the gradient: use torch.where first"
        assert not gradient[outside].any(), "the gradient must be 0 outside the mask"
        torch.testing.assert_close(gradient, expected, rtol=self.rtol, atol=1e-6)

    def test_a_row_is_alone(self, function: Loss, batch: PolicyLossInput) -> None:
        """The split of an update into micro-batches must not change its gradient."""
        import torch

        whole, gradient = function(batch).losses.detach(), _gradient(function, batch)
        for rows in ([0], [2, 1], [5, 3, 4]):
            part = _map_tensors(batch, itemgetter(rows))
            hint = "a row's loss may depend only on that row (statistics of an episode belong in advantages)"
            close = torch.allclose(function(part).losses.detach(), whole[rows], rtol=self.rtol, atol=1e-6)
            assert close, f"losses of rows {rows} differ with other rows in the batch: {hint}"
            assert torch.allclose(_gradient(function, part), gradient[rows], rtol=self.rtol, atol=1e-6), hint

    def test_padding_adds_nothing(self, function: Loss, batch: PolicyLossInput) -> None:
        import torch

        wide = _map_tensors(batch, lambda tensor: torch.nn.functional.pad(tensor, (0, 3)))
        torch.testing.assert_close(
            function(wide).losses[:, :-3], function(batch).losses, rtol=self.rtol, atol=1e-6, check_stride=False
        )

    def test_before_the_first_step_it_is_the_policy_gradient(self, function: Loss) -> None:
        import torch

        if not self.starts_as_policy_gradient:
            return
        batch = _batch(0.0)
        expected = torch.where(batch.mask, -batch.advantages, 0.0)
        torch.testing.assert_close(_gradient(function, batch), expected, rtol=1e-4, atol=1e-5)

    def test_better_tokens_become_likelier(self, function: Loss) -> None:
        """A step against the gradient near the old policy raises log-probs of tokens with positive advantage."""
        batch = _batch(0.01)
        gained = -(_gradient(function, batch) * batch.advantages)[batch.mask].sum()
        assert gained > 0, "a step lowers log-probs of tokens with positive advantage. Is the sign wrong?"

    def test_far_ratios_stay_finite(self, function: Loss) -> None:
        import torch

        batch = _batch(60.0)
        losses = function(batch).losses
        assert bool(torch.isfinite(losses).all() and torch.isfinite(_gradient(function, batch)).all()), (
            "log-ratios of 60 nats overflow: clamp them (rlhf_objective.importance_ratio)"
        )


def _batch(distance: float) -> PolicyLossInput:
    import torch

    generator = torch.Generator().manual_seed(7)
    mask = rlhf_forward.mask_from_lengths(torch.tensor([4, 1, 6, 3, 0, 5]), 6)
    mask[2, 2:4] = False  # an observation between two turns
    old = -torch.rand(mask.shape, generator=generator) * 3 - 0.05
    change = (torch.rand(mask.shape, generator=generator) - 0.5) * 2 * distance
    advantages = torch.randn(mask.shape, generator=generator)
    log_probs = (old + change).clamp(max=-1e-3) if distance < 10 else old + change
    marked = (torch.rand(mask.shape, generator=generator) < 0.3) & mask if distance else None
    return objective.PolicyLossInput(log_probs.requires_grad_(), old, advantages, mask, marked)


def _map_tensors(batch: PolicyLossInput, change: Callable[[Tensor], Tensor]) -> PolicyLossInput:
    """Apply `change` to each tensor of the batch."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    new: dict[str, Any] = {name: value if value is None else change(value.detach()) for name, value in values.items()}
    new["log_probs"].requires_grad_()
    return replace(batch, **new)


def _gradient(function: Loss, batch: PolicyLossInput) -> Tensor:
    """Gradient of the summed losses with respect to the log-probs, [B, A]."""
    import torch

    return torch.autograd.grad(function(batch).losses.sum(), batch.log_probs)[0]
