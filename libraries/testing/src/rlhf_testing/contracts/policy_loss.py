"""The contract of a policy loss: per-token losses of rows that know nothing of one another."""

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
    """Six answers of different lengths, one of them masked whole, under a policy that has moved a little or much."""

    kind = "policy_losses"
    starts_as_policy_gradient: ClassVar[bool] = True
    """Whether, before the first step, the gradient by each token's log-prob is minus its advantage."""
    rtol: ClassVar[float] = 1e-5

    @pytest.fixture(params=[0.05, 0.5, 5.0])
    @classmethod
    def batch(cls, request: pytest.FixtureRequest) -> PolicyLossInput:
        """Log-probs that lie this far from the old ones, in nats."""
        return _batch(request.param)

    def test_losses_are_numbers_of_the_tokens_that_count(self, function: Loss, batch: PolicyLossInput) -> None:
        import torch

        found = function(batch)
        assert isinstance(found, objective.PolicyLoss), f"it returns a {type(found).__name__}, not a PolicyLoss"
        for name, values in (("losses", found.losses), ("ratio", found.ratio)):
            assert values.shape == batch.mask.shape, f"{name} are {tuple(values.shape)}: [B, A] of the batch"
            assert values.dtype == torch.float32, f"{name} are {values.dtype}, not float32"
            assert bool(torch.isfinite(values[batch.mask]).all()), f"{name} are not all finite"
        assert not found.losses[~batch.mask].any(), "losses are 0 outside the mask"
        assert not found.ratio.requires_grad, "the ratio is for metrics: detach it"
        for name, flags in (("clipped", found.clipped), ("dual_clipped", found.dual_clipped)):
            assert flags.dtype == torch.bool and flags.shape == batch.mask.shape, f"{name} is [B, A] bool"
            assert not flags[~batch.mask].any(), f"{name} is False outside the mask"

    def test_what_is_masked_reaches_no_gradient(self, function: Loss, batch: PolicyLossInput) -> None:
        """Whatever stands there: padding, a masked answer, an observation."""
        import torch

        outside = ~batch.mask
        broken = replace(
            batch,
            log_probs=batch.log_probs.detach().masked_fill(outside, math.nan).requires_grad_(),
            old_log_probs=batch.old_log_probs.masked_fill(outside, -math.inf),
            advantages=batch.advantages.masked_fill(outside, math.nan),
        )
        whole, found = _gradient(function, batch), _gradient(function, broken)
        assert bool(torch.isfinite(found).all()), "NaN under a False mask reaches the gradient: use torch.where first"
        assert not found[outside].any(), "tokens outside the mask have a gradient"
        torch.testing.assert_close(found, whole, rtol=self.rtol, atol=1e-6)

    def test_a_row_is_alone(self, function: Loss, batch: PolicyLossInput) -> None:
        """How an update is cut into micro-batches must not change its gradient."""
        import torch

        whole, gradient = function(batch).losses.detach(), _gradient(function, batch)
        for rows in ([0], [2, 1], [5, 3, 4]):
            part = _mapped(batch, itemgetter(rows))
            hint = "a loss may look at its own row only (statistics of an episode belong into advantages)"
            close = torch.allclose(function(part).losses.detach(), whole[rows], rtol=self.rtol, atol=1e-6)
            assert close, f"losses of rows {rows} differ with other rows beside them: {hint}"
            assert torch.allclose(_gradient(function, part), gradient[rows], rtol=self.rtol, atol=1e-6), hint

    def test_padding_adds_nothing(self, function: Loss, batch: PolicyLossInput) -> None:
        import torch

        wide = _mapped(batch, lambda tensor: torch.nn.functional.pad(tensor, (0, 3)))
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
        """A step against the gradient near the old policy raises what has an advantage, and lowers the rest."""
        batch = _batch(0.01)
        gained = -(_gradient(function, batch) * batch.advantages)[batch.mask].sum()
        assert gained > 0, "a step makes tokens of positive advantage less likely: the sign?"

    def test_far_ratios_stay_finite(self, function: Loss) -> None:
        import torch

        batch = _batch(60.0)
        found = function(batch)
        assert bool(torch.isfinite(found.losses).all() and torch.isfinite(_gradient(function, batch)).all()), (
            "log-ratios of some 60 nats overflow: clamp them (rlhf_objective.importance_ratio)"
        )


def _batch(distance: float) -> PolicyLossInput:
    import torch

    generator = torch.Generator().manual_seed(7)
    mask = rlhf_forward.mask_from_lengths(torch.tensor([4, 1, 6, 3, 0, 5]), 6)
    mask[2, 2:4] = False  # an observation between two turns
    old = -torch.rand(mask.shape, generator=generator) * 3 - 0.05
    moved = (torch.rand(mask.shape, generator=generator) - 0.5) * 2 * distance
    advantages = torch.randn(mask.shape, generator=generator)
    log_probs = (old + moved).clamp(max=-1e-3) if distance < 10 else old + moved
    marked = (torch.rand(mask.shape, generator=generator) < 0.3) & mask if distance else None
    return objective.PolicyLossInput(log_probs.requires_grad_(), old, advantages, mask, marked)


def _mapped(batch: PolicyLossInput, change: Callable[[Tensor], Tensor]) -> PolicyLossInput:
    """The batch with each of its tensors changed."""
    given = {field.name: getattr(batch, field.name) for field in fields(batch)}
    made: dict[str, Any] = {name: value if value is None else change(value.detach()) for name, value in given.items()}
    made["log_probs"].requires_grad_()
    return replace(batch, **made)


def _gradient(function: Loss, batch: PolicyLossInput) -> Tensor:
    """[B, A] of the summed losses by the log-probs."""
    import torch

    return torch.autograd.grad(function(batch).losses.sum(), batch.log_probs)[0]
