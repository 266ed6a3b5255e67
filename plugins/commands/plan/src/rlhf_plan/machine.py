"""Measures this machine's speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GPU_EFFICIENCY = 0.5
"""Share of a large multiplication's speed that training usually reaches on a GPU."""
_ROUNDS = 3
_SIZE = 768
_GPU_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Machine:
    """Speed of one process's device."""

    device: str
    flops: float
    """Floating-point operations per second of a large multiplication."""
    bytes_per_second: float
    """Memory read bandwidth."""
    seconds_per_call: float
    """Time to launch a small operation, which bounds generation of a small model."""


GPU_ELSEWHERE = Machine("a GPU, which this machine lacks", nan, nan, nan)
"""Of unknown speed."""


def measure(device: torch.device) -> Machine:
    """Time one large multiplication, one read of a large tensor, and one small operation."""
    import torch

    from rlhf_passes import linear_product

    if device.type == "cuda" and not torch.cuda.is_available():
        return GPU_ELSEWHERE
    size = _GPU_SIZE if device.type == "cuda" else _SIZE
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    square = torch.ones(size, size, device=device, dtype=dtype)
    large = torch.ones(16_000_000, device=device)
    small = torch.ones(8, 8, device=device)
    product = _fastest(lambda: linear_product(square, square, None), device)
    read = _fastest(lambda: large.sum(), device)
    call = _fastest(lambda: [small @ small for _ in range(100)], device) / 100
    flops = 2 * size**3 / product * (_GPU_EFFICIENCY if device.type == "cuda" else 1)
    return Machine(name, flops, large.numel() * 4 / read, call)


def _fastest(action: Callable[[], object], device: torch.device) -> float:
    import torch

    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
