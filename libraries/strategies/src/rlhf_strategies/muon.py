"""Muon (Jordan 2024): matrices step along their orthogonalized momentum, all other parameters by AdamW.

The scaling `match_rms_adamw` is that of Moonlight (Liu 2025, arXiv:2502.16982, equation 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlhf_core.components import OptimizerContext

from .more_optimizers import MuonConfig
from .shards import local_part, whole_tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, which moves all singular values close to 1."""


class Muon(Optimizer):
    """Muon for the parameter group `muon`, AdamW for the group `adamw`. Both have decoupled weight decay.

    A matrix that a strategy shards (a `DTensor`) is gathered for its step, and every process computes the same step.
    State is `momentum` for a matrix, `step`, `exp_avg` and `exp_avg_sq` for others, each in the parameter's layout.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: Not supported.
        """
        assert closure is None
        for group in self.param_groups:
            update = _muon_step if group["kind"] == "muon" else _adamw_step
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    update(parameter, parameter.grad, self.state[parameter], group)


def _muon_step(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
    momentum.lerp_(gradient, 1.0 - group["momentum"])
    direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    step = orthogonalized(whole_tensor(direction), group["ns_steps"])
    rows, columns = parameter.shape
    if group["adjust_lr"] == "original":
        factor = math.sqrt(max(1.0, rows / columns))
    else:
        factor = 0.2 * math.sqrt(max(rows, columns))
    parameter.add_(local_part(parameter, step.to(parameter.dtype)), alpha=-group["lr"] * factor)


def _adamw_step(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    (beta1, beta2), step = group["betas"], int(state.get("step", 0)) + 1
    mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
    square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
    state["step"] = step
    mean.lerp_(gradient, 1.0 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    root = (square.sqrt() / math.sqrt(1.0 - beta2**step)).add_(group["eps"])
    parameter.addcdiv_(mean, root, value=-group["lr"] / (1.0 - beta1**step))


def orthogonalized(matrix: Tensor, num_steps: int, eps: float = 1e-7) -> Tensor:
    """Return approximately U V^T of the singular value decomposition U S V^T, by a Newton-Schulz iteration in bfloat16.

    Args:
        matrix: [rows, columns] of any float dtype.
        num_steps: Number of iterations.
        eps: Minimum of the norm that divides the matrix.

    Returns:
        [rows, columns] bfloat16.
    """
    a, b, c = _COEFFICIENTS
    step = matrix.bfloat16()
    is_tall = step.shape[0] > step.shape[1]
    step = step.T if is_tall else step
    step = step / step.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = step @ step.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        step = torch.addmm(step, polynomial, step, beta=a)
    return step.T if is_tall else step


def build(config: MuonConfig, context: OptimizerContext) -> Muon:
    """Build Muon over the matrices that are neither embeddings nor heads, and AdamW over the rest.

    Args:
        config: Options.
        context: Parameters of the model and the peak rate.

    Returns:
        The optimizer, whose groups are named by `kind`.
    """
    chosen: dict[str, list[Any]] = {"muon": [], "adamw": []}
    for name, parameter in context.parameters.items():
        is_other = parameter.ndim != 2 or any(part in name for part in config.adamw_names)
        chosen["adamw" if is_other else "muon"].append(parameter)
    options = config.model_dump(
        include={"betas", "eps", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr"}
    )
    groups = [{"kind": kind, "params": parameters} for kind, parameters in chosen.items() if parameters]
    return Muon(groups, {"lr": context.lr, **options})
