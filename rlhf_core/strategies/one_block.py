"""AdamW's moments in one block of host memory, apart from the heap in which the tensors of a pass come and go.

Each in a tensor of its own, they would be placed between those of the first update, and leave holes as these are freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..util.host_memory import release_freed_memory

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNED = 16
"""Elements: 64 bytes in float32."""


def begin_moments(optimizer: Optimizer) -> None:
    """Make the state of torch's AdamW for float32 CPU parameters that have gradients and no state yet.

    It is what the first step would make. Other optimizers, types and devices are left alone.
    """
    import torch

    if type(optimizer) is not torch.optim.AdamW:
        return
    given = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    new = [
        param
        for param in given
        if type(param) is torch.nn.Parameter
        and param.device.type == "cpu"
        and param.dtype is torch.float32
        and param.is_contiguous()
        and not optimizer.state.get(param)
    ]
    if not new:
        return
    release_freed_memory()  # what the passes before the first step left
    sizes = [-(-param.numel() // _ALIGNED) * _ALIGNED for param in new]
    for moment in _MOMENTS:
        places = torch.zeros(sum(sizes)).split(sizes)
        for param, place in zip(new, places, strict=True):
            optimizer.state[param][moment] = place[: param.numel()].view(param.shape)
    for param in new:
        optimizer.state[param]["step"] = torch.zeros((), dtype=torch.float32)
