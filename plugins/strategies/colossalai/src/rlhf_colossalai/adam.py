"""HybridAdam, with kernels written in torch for machines where ColossalAI's own cannot be built.

ColossalAI compiles its Adam kernels at first use with nvcc. On a machine without it, the same loader is given
the update below instead: `foreach` operations, the same numbers to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from colossalai.kernel.kernel_loader import CPUAdamLoader, FusedOptimizerLoader, KernelLoader
from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.gemini import gemini_optimizer
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def adam_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    div_scale: float = -1.0,
) -> None:
    """One AdamW step (Loshchilov 2019) in place, of tensors of one device.

    `step` counts from 1; gradients of any float type are divided by `div_scale` where it is positive.
    """
    wide = [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)]
    if div_scale > 0:
        wide = list(torch._foreach_div(wide, div_scale))
    if weight_decay and decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    elif weight_decay:
        wide = list(torch._foreach_add(wide, params, alpha=weight_decay))
    torch._foreach_lerp_(exp_avgs, wide, 1 - betas[0])
    torch._foreach_mul_(exp_avg_sqs, betas[1])
    torch._foreach_addcmul_(exp_avg_sqs, wide, wide, value=1 - betas[1])
    correction1 = 1 - betas[0] ** step if bias_correction else 1.0
    correction2 = 1 - betas[1] ** step if bias_correction else 1.0
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, correction2**0.5)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, value=-lr / correction1)


class RunHybridAdam(HybridAdam):  # type: ignore[misc]  # ColossalAI has no types
    """HybridAdam that clips host bf16 gradients too.

    ColossalAI 0.5.0 updates a bf16 gradient in host memory (offloaded, or no GPU) without dividing it by
    `div_scale`, which is how Gemini clips: clipping was silently lost there.
    """

    _div_scale = -1.0

    def _get_numel(self) -> int:
        """Same result as ColossalAI's, which uses torch's deprecated typed storage."""
        return sum(param.numel() for group in self.param_groups for param in group["params"])

    def _post_state_init(self, param: Tensor) -> None:
        """Do nothing: no state is kept on NVMe."""

    def step(self, closure: None = None, div_scale: float = -1) -> None:
        self._div_scale = div_scale
        super().step(closure, div_scale)

    def torch_adam_update(self, data: Tensor, grad: Tensor, *state: Any, **options: Any) -> None:
        wide = grad.to(data.dtype)
        super().torch_adam_update(data, wide / self._div_scale if self._div_scale > 0 else wide, *state, **options)


# GeminiOptimizer compares types with this set; a subclass has to be named in it.
gemini_optimizer._AVAIL_OPTIM_LIST.add(RunHybridAdam)


class _HostAdam:
    """Replaces `CPUAdamLoader().load().CPUAdamOptimizer`."""

    def __init__(self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool) -> None:
        self._decoupled = decoupled

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        div_scale: float,
    ) -> None:
        adam_update(
            [param],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            step=step,
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            decoupled=self._decoupled,
            bias_correction=bias_correction,
            div_scale=div_scale,
        )


def _multi_tensor_adam(
    chunk_size: int,
    overflow_flag: Tensor,
    tensors: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
    div_scale: float,
) -> None:
    grads, params, exp_avgs, exp_avg_sqs = tensors
    adam_update(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        decoupled=bool(decoupled),
        bias_correction=bool(bias_correction),
        div_scale=div_scale,
    )


class _TorchKernels:
    """A kernel extension for ColossalAI's loaders, and the module it loads."""

    name = "rlhf_torch_adam"
    priority = 0
    CPUAdamOptimizer = _HostAdam
    multi_tensor_adam = staticmethod(_multi_tensor_adam)

    def is_available(self) -> bool:
        return True

    def assert_compatible(self) -> None:
        """Pass: torch runs everywhere."""

    def load(self) -> _TorchKernels:
        return self


def _works(loader: type[KernelLoader]) -> bool:
    try:
        loader().load()
    except Exception as error:  # a build can fail in any way: missing nvcc, headers, a compiler error, no rights
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        logger.warning("ColossalAI's %s kernel cannot be built (%s); torch's is used", loader.__name__, reason)
        return False
    return True


def ensure_kernels(device: torch.device) -> None:
    """Make sure HybridAdam finds kernels: ColossalAI's where they build, otherwise torch's (logged once)."""
    for loader in (CPUAdamLoader, FusedOptimizerLoader):
        if _TorchKernels not in loader.REGISTRY and (device.type == "cpu" or not _works(loader)):
            loader.REGISTRY[:] = [_TorchKernels]


def make_hybrid_adam(
    params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Any:
    """HybridAdam over the trainable parameters, as Gemini and LowLevelZero require."""
    trainable = [param for param in params if param.requires_grad]
    return RunHybridAdam(trainable, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
