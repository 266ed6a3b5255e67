"""Copies of linear weights in the fastest type, and on a CPU the fastest layout, for one generation.

The trainer's module is changed only inside `applied()`, and only by an instance attribute that is removed
again; parameters are never touched. Measured on two AVX-512 cores at 32 rows: 2.0x at 512x512, 2.6x at
512x8192 (fp32), 1.2-1.3x (bf16), and a loss below a few million multiplications a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf_passes import IS_FASTER_HERE, MIN_MULTIPLICATIONS, linear_product

_VOCABULARY = 16
"""Outputs for each input from which a layer is taken for a head."""


def can_prepack(linear: nn.Module, dtype: torch.dtype) -> bool:
    """True for a plain Linear on a CPU where oneDNN multiplies `dtype` natively."""
    if not _is_plain(linear) or linear.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and "forward" not in vars(module)


class PackedLinears:
    """Copies of a module's Linear weights, made at construction: the large ones packed, all in the requested type."""

    def __init__(self, module: nn.Module, *, num_rows: int, dtype: torch.dtype | None = None) -> None:
        """`num_rows` is the largest decoding batch: layers that gain there are packed.

        `dtype`: type of the copies and of the multiplication; None is the weights' own.
        """
        self._packed: list[tuple[nn.Linear, Callable[[Tensor], Tensor]]] = []
        linears = [each for each in module.modules() if _is_plain(each)]
        # The small copies fit between the large ones, which the allocator aligns to huge pages.
        for linear in sorted(linears, key=lambda each: each.weight.numel(), reverse=True):
            target = dtype or linear.weight.dtype
            packs = num_rows * linear.weight.numel() >= MIN_MULTIPLICATIONS and can_prepack(linear, target)
            if packs and target is linear.weight.dtype is torch.float32 and _needs_no_copy(linear):
                self._packed.append((linear, partial(_plain_forward, linear)))
            elif packs:
                self._packed.append((linear, _packed_forward(linear, num_rows, target)))
            elif target is not linear.weight.dtype:
                self._packed.append((linear, _cast_forward(linear, target)))

    def __len__(self) -> int:
        return len(self._packed)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the module computes with the copies."""
        done: list[nn.Linear] = []
        try:
            for linear, forward in self._packed:
                linear.forward = forward  # type: ignore[method-assign, assignment]
                done.append(linear)
            yield
        finally:
            for linear in done:
                del linear.forward


def _cast(linear: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weight and bias as `dtype`: the parameters themselves where they are that already."""
    bias = None if linear.bias is None else linear.bias.detach().to(dtype)
    return linear.weight.detach().to(dtype), bias


def _cast_forward(linear: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight, bias = _cast(linear, dtype)
    return lambda inputs: functional.linear(inputs.to(dtype), weight, bias)


def _needs_no_copy(linear: nn.Linear) -> bool:
    """Whether it is a vocabulary's head, of which a copy takes much memory, and oneDNN multiplies by it as it is.

    49k x 576 on Zen 5: 21.8 ms against 18.5 ms for 64 rows, 50 ms by MKL; a copy takes 60 ms for each generation.
    """
    return IS_FASTER_HERE and linear.out_features >= _VOCABULARY * linear.in_features


def _plain_forward(linear: nn.Linear, inputs: Tensor) -> Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1])
    if len(rows) == 1:  # oneDNN takes another kernel there: a row must have the same logits in any batch
        rows = rows.expand(2, -1)
    product = linear_product(rows, linear.weight, linear.bias)[: inputs.numel() // inputs.shape[-1]]
    return product.view(*inputs.shape[:-1], linear.out_features)


def _packed_forward(linear: nn.Linear, num_rows: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight, bias = _cast(linear, dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), num_rows)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    mixed = dtype is not linear.weight.dtype

    def forward(inputs: Tensor) -> Tensor:
        if mixed:
            inputs = inputs.to(dtype)
        if inputs.dtype is not dtype:
            return functional.linear(inputs, weight, bias)
        product: Tensor = multiply(inputs, packed, bias, "none", [], "")
        return product

    return forward
