"""HybridAdam, which Gemini and LowLevelZero require, with the step of torch's AdamW.

ColossalAI compiles kernels of its own at first use, with nvcc; torch brings kernels that do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from colossalai.nn.optimizer import HybridAdam
from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.zero.gemini import gemini_optimizer
from torch import nn
from torch.optim.adamw import adamw


class RunHybridAdam(HybridAdam):  # type: ignore[misc]  # ColossalAI has no types
    """HybridAdam that needs no kernel of ColossalAI's."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        # The constructor of HybridAdam itself loads kernels.
        NVMeOptimizer.__init__(self, params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None, div_scale: float = -1.0) -> None:
        """Step each parameter (Loshchilov 2019). Gradients of any float type are divided by `div_scale` if positive."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    state.update(moments, step=0)
                grad = parameter.grad.to(parameter.dtype)
                adamw(
                    [parameter],
                    [grad / div_scale if div_scale > 0 else grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(float(state["step"]), device=parameter.device)],
                    # With a GPU one kernel, also for what is kept in host memory.
                    fused=torch.cuda.is_available(),
                    foreach=False,
                    amsgrad=False,
                    maximize=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                )
                state["step"] += 1


# GeminiOptimizer compares types with this set; a subclass has to be named in it.
gemini_optimizer._AVAIL_OPTIM_LIST.add(RunHybridAdam)
