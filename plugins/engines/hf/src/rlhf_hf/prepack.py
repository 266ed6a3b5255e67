"""Linear weights in the layout oneDNN multiplies fastest, on CPU, for the time of a generation.

The trainer's module is changed only inside `applied()`, and only by an instance attribute that is removed
again; parameters are never touched. Measured on two AVX-512 cores at 32 rows: 2.0x at 512x512, 2.6x at
512x8192 (fp32), 1.2-1.3x (bf16), and a loss below about a million multiplications a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_MULTIPLICATIONS = 1_000_000
"""rows x in x out from which a packed call wins. A constant, not a measurement: runs must repeat bit for bit."""

Prepack = Literal["auto", "on", "off"]


def can_prepack(linear: nn.Module) -> bool:
    """True for a plain CPU Linear in a dtype that oneDNN multiplies natively."""
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or "forward" in vars(linear):
        return False
    weight = linear.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


class PackedLinears:
    """Packed copies of a module's large Linears, as of construction."""

    def __init__(self, module: nn.Module, *, num_rows: int, mode: Prepack) -> None:
        """`num_rows` is the largest decoding batch; `auto` packs what wins there, `on` everything it can."""
        threshold = MIN_MULTIPLICATIONS if mode == "auto" else 0
        self._packed: list[tuple[nn.Linear, Callable[[Tensor], Tensor]]] = []
        if mode == "off":
            return
        for linear in module.modules():
            if not can_prepack(linear):
                continue
            assert isinstance(linear, nn.Linear)
            if num_rows * linear.weight.numel() >= threshold:
                self._packed.append((linear, _packed_forward(linear, num_rows, threshold)))

    def __len__(self) -> int:
        return len(self._packed)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module computes with the packed weights inside."""
        done: list[nn.Linear] = []
        try:
            for linear, forward in self._packed:
                linear.forward = forward  # type: ignore[method-assign, assignment]
                done.append(linear)
            yield
        finally:
            for linear in done:
                del linear.forward


def _packed_forward(linear: nn.Linear, num_rows: int, threshold: int) -> Callable[[Tensor], Tensor]:
    weight, bias = linear.weight.detach(), linear.bias
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), num_rows)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    out_features, dtype = weight.shape[0], weight.dtype

    def forward(inputs: Tensor) -> Tensor:
        if inputs.dtype is not dtype or inputs.numel() * out_features < threshold:
            return functional.linear(inputs, weight, bias)
        product: Tensor = multiply(inputs, packed, bias, "none", [], "")
        return product

    return forward
