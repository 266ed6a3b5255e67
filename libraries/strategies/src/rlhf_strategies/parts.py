"""Building blocks of strategies: device, precision, AdamW, loss scaling, and the step of a torch optimizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_core.errors import ConfigError, DivergenceError, UserInputError
from rlhf_core.util.host_memory import release_freed_memory

from .master_adamw import MasterAdamW, is_16_bit
from .shards import whole_tensor

Precision = Literal["auto", "fp32", "bf16", "fp16"]
ResolvedPrecision = Literal["fp32", "bf16", "fp16"]
"""The option `precision` of a run file with `auto` resolved."""

_SCHEDULER_FILE = "scheduler.json"
_FIRST_SCALE = 2.0**16
_STEPS_PER_GROWTH = 1000
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNED = 16
"""Alignment in elements: 64 bytes in float32."""


def check_offload(device: torch.device, enabled: Mapping[str, bool]) -> None:
    """Check that no offload option is enabled without a GPU.

    Args:
        device: device of the run.
        enabled: name of each offload option, and whether it is on.

    Raises:
        ConfigError: an option is on and the device is a CPU.
    """
    for option, is_on in enabled.items():
        if is_on and device.type == "cpu":
            raise ConfigError(
                f"{option} needs a GPU: it moves data between a GPU and host memory",
                where=f"strategy.{option}",
                hint=f"remove strategy.{option}",
            )


def resolve_precision(precision: Precision, device: torch.device, on_cpu: ResolvedPrecision) -> ResolvedPrecision:
    """Return the precision with `auto` resolved: bf16 on a GPU, `on_cpu` elsewhere, never fp16.

    Args:
        precision: the option of the run file.
        device: device of the run.
        on_cpu: precision to use on a CPU.

    Example:
        >>> resolve_precision("auto", torch.device("cpu"), "fp32")
        'fp32'
    """
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" else on_cpu


def torch_dtype(precision: ResolvedPrecision) -> torch.dtype:
    """Return the torch type of a precision.

    Args:
        precision: `fp32`, `bf16` or `fp16`.

    Example:
        >>> torch_dtype("bf16")
        torch.bfloat16
    """
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def make_adamw(
    params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Optimizer:
    """Create torch's fused AdamW (one kernel for all parameters, on GPUs and CPUs).

    Args:
        params: parameters. Frozen ones are ignored.
        lr: learning rate.
        betas: decay rates of the running mean and the running square.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.

    Returns:
        The optimizer, a `MasterAdamW` if some parameters have 16 bits.

    Raises:
        UserInputError: all parameters are frozen.
    """
    trainable = [param for param in params if param.requires_grad]
    if not trainable:
        raise UserInputError("all parameters of the model are frozen", where="optimizer", hint="unfreeze some of them")
    if any(is_16_bit(param) for param in trainable):
        return MasterAdamW(trainable, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    return torch.optim.AdamW(trainable, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius 2018): grows while gradients are finite, halves when not.

    All ranks see the same global gradient norm, so all ranks keep the same scale.

    Args:
        enabled: whether to scale. Otherwise the scale stays 1.

    Example:
        >>> scale = LossScale(enabled=True)  # 2^16
        >>> scale.found_overflow()
        >>> scale.applied_to(torch.tensor(1.0))
        tensor(32768.)
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = _FIRST_SCALE if enabled else 1.0
        self._good_steps = 0

    def applied_to(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self.enabled else loss

    def found_overflow(self) -> None:
        self.scale, self._good_steps = self.scale / 2, 0

    def found_finite(self) -> None:
        self._good_steps += 1
        if self.enabled and self._good_steps % _STEPS_PER_GROWTH == 0:
            self.scale *= 2


def diverged(norm: float, where: str = "training") -> DivergenceError:
    """Return the error for a gradient that is not finite.

    Args:
        norm: the gradient norm, NaN or infinite.
        where: place to name in the error.
    """
    return DivergenceError(
        f"the gradient norm is {norm}, so this step was not applied",
        where=where,
        hint="lower optimizer.lr (or optimizer.max_grad_norm). With fp16, use `--set strategy.precision=bf16`",
    )


def _with_gradients(optimizer: Optimizer) -> list[Tensor]:
    """The tensors with gradients that the optimizer will step: float32 master weights if it keeps them."""
    if isinstance(optimizer, MasterAdamW):
        return optimizer.take_gradients()
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def begin_moments(optimizer: Optimizer) -> None:
    """Create the state of torch's AdamW for float32 CPU parameters that have gradients and lack state.

    The first step would create the same state. Here it is one block of host memory, apart from the heap that a pass
    allocates from. As separate tensors they would lie between those of the first update and leave the heap fragmented
    once these are freed. Other optimizers, types and devices are left alone.
    """
    if type(optimizer) is not torch.optim.AdamW:
        return
    stepped = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    new = [
        param
        for param in stepped
        if type(param) is torch.nn.Parameter
        and param.device.type == "cpu"
        and param.dtype is torch.float32
        and param.is_contiguous()
        and not optimizer.state.get(param)
    ]
    if not new:
        return
    release_freed_memory()  # freed by the passes before the first step
    sizes = [-(-param.numel() // _ALIGNED) * _ALIGNED for param in new]
    for moment in _MOMENTS:
        places = torch.zeros(sum(sizes)).split(sizes)
        for param, place in zip(new, places, strict=True):
            optimizer.state[param][moment] = place[: param.numel()].view(param.shape)
    for param in new:
        optimizer.state[param]["step"] = torch.zeros((), dtype=torch.float32)


def torch_step(
    optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None, loss_scale: LossScale
) -> float:
    """Unscale and clip gradients, step the optimizer and the schedule, and clear the gradients.

    If the gradient norm is not finite under fp16, the step is skipped and the loss scale halved, until it is 1.

    Args:
        optimizer: torch optimizer whose parameters hold gradients.
        scheduler: schedule to step after the optimizer, or None.
        max_grad_norm: maximum global gradient norm, or None for no clipping.
        loss_scale: scale that was applied to the loss.

    Returns:
        The global gradient norm before clipping, `inf` for a skipped step.

    Raises:
        DivergenceError: the norm is not finite, and the loss is not scaled or its scale is already 1.
    """
    params = _with_gradients(optimizer)
    grads = [param.grad for param in params if param.grad is not None]
    if loss_scale.enabled and grads:
        torch._foreach_mul_(grads, 1.0 / loss_scale.scale)
    total = whole_tensor(get_total_norm(grads)) if grads else torch.zeros(())
    norm = float(total)
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        if loss_scale.enabled and loss_scale.scale > 1.0:
            loss_scale.found_overflow()
            return math.inf
        raise diverged(norm)
    if max_grad_norm is not None:
        clip_grads_with_norm_(params, max_grad_norm, total.to(params[0].device) if params else total)
    begin_moments(optimizer)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    loss_scale.found_finite()
    optimizer.zero_grad(set_to_none=True)
    return norm


def save_scheduler(scheduler: LRScheduler, path: Path) -> None:
    """Write a schedule's progress into the folder `path`."""
    path.mkdir(parents=True, exist_ok=True)
    state = scheduler.state_dict()
    kept = {key: state[key] for key in ("last_epoch", "_step_count", "_last_lr") if key in state}
    (path / _SCHEDULER_FILE).write_text(json.dumps(kept))


def load_scheduler(scheduler: LRScheduler, path: Path) -> None:
    """Restore a schedule's progress."""
    scheduler.load_state_dict({**scheduler.state_dict(), **json.loads((path / _SCHEDULER_FILE).read_text())})


def grouped_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters, per parameter group.

    Args:
        model: the model that the parameters belong to.
        optimizer: an optimizer of its parameters.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> grouped_names(model, torch.optim.SGD(model.parameters(), lr=0.1))
        [['weight', 'bias']]
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
