"""torch's AdamW with the interface of HybridAdam, which Gemini and LowLevelZero require.

ColossalAI compiles its own kernels with nvcc at first use. torch ships kernels that do the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.gemini import gemini_optimizer
from torch import nn


class RunHybridAdam(torch.optim.AdamW):
    """torch's AdamW with the attributes that ColossalAI's optimizers expect from HybridAdam."""

    num_fp32_shards_per_param = HybridAdam.num_fp32_shards_per_param

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        # With a GPU use the fused kernel, also for state in host memory.
        fused = torch.cuda.is_available()
        trainable = [param for param in params if param.requires_grad]
        super().__init__(trainable, lr, betas, eps, weight_decay, foreach=False, fused=fused)

    @torch.no_grad()
    def step(self, closure: None = None, div_scale: float = -1.0) -> None:  # type: ignore[override]
        """Step (Loshchilov 2019). Gradients of any float type are freed, after division by a positive `div_scale`."""
        groups = self.param_groups
        try:
            # One by one, so that only one gradient at a time is held in full precision.
            for group, parameter in ((each, parameter) for each in groups for parameter in each["params"]):
                if parameter.grad is not None:
                    grad = parameter.grad.to(parameter.dtype)
                    parameter.grad = grad / div_scale if div_scale > 0 else grad
                    self.param_groups = [{**group, "params": [parameter]}]
                    super().step()
                    parameter.grad = None
        finally:
            self.param_groups = groups


# GeminiOptimizer compares types with this set.
gemini_optimizer._AVAIL_OPTIM_LIST.add(RunHybridAdam)
