"""The optimizer `signum`: `optimizer: {name: signum, lr: 1.0e-5}`."""

from collections.abc import Callable

import torch

from rlhf_core.components import OptimizerContext

from .config import SignumConfig


class Signum(torch.optim.Optimizer):
    """Moves each weight by the learning rate against the sign of its mean gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Make a step. Core has already clipped the gradients and set the rate."""
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1.0 - group["momentum"])
                parameter.sub_(mean.sign(), alpha=group["lr"])


def build(config: SignumConfig, context: OptimizerContext) -> torch.optim.Optimizer:
    """Create the optimizer of one trained model. The first step creates its state, which checkpoints contain."""
    return Signum(context.parameters.values(), {"lr": context.lr, "momentum": config.momentum})
