"""Products of float32 weights in bfloat16 autocast on a CPU, with weights cast once for all passes of an update.

On processors with bfloat16 instructions, a product of a pass of 200 tokens takes about as long as the cast of its
weight, and half as long as the cast of the weight's gradient. The results are those of autocast: the same values are
rounded. float32 weights remain the master weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary


class NarrowCopies:
    """Copies of weights in bfloat16, for passes between which weights do not change.

    torch does not count all changes: neither a step of fused AdamW nor one through `.data`. A change that it counts
    makes another copy.
    """

    def __init__(self) -> None:
        self._copies: Any = WeakTensorKeyDictionary()
        self._inputs: weakref.ref[Tensor] | None = None
        """The last inputs of a layer."""
        self._version = 0
        self._narrow: Tensor | None = None

    def of(self, weight: Tensor) -> Tensor:
        """Return the copy of a float32 weight."""
        source = weight.detach()
        if weight.is_inference():
            return source.bfloat16()
        state = weight._version, weight.data_ptr(), weight.stride()
        copy: Tensor | None
        copy, copied = self._copies.get(weight, (None, None))
        if copy is None or copied != state:
            copy = source.bfloat16()
            self._copies[weight] = copy, state
        return copy

    def narrow(self, inputs: Tensor) -> Tensor:
        """Return inputs [..., K] as bfloat16 rows [T, K]. The parts of a block read the same ones."""
        narrow = inputs.detach().reshape(-1, inputs.shape[-1])
        if inputs.is_inference() or inputs.dtype is torch.bfloat16:
            return narrow.bfloat16()
        if self._inputs is None or self._inputs() is not inputs or self._version != inputs._version:
            self._inputs, self._version, self._narrow = weakref.ref(inputs), inputs._version, narrow.bfloat16()
        assert self._narrow is not None
        return self._narrow


_COPIES: ContextVar[NarrowCopies | None] = ContextVar("copies of weights in bfloat16", default=None)


@contextmanager
def narrow_copies(copies: NarrowCopies) -> Iterator[None]:
    """Context in which passes use these copies."""
    token = _COPIES.set(copies)
    try:
        yield
    finally:
        _COPIES.reset(token)


def narrow_copy(weight: Tensor) -> Tensor | None:
    """Return the copy of a weight, or None outside `narrow_copies` and outside bfloat16 autocast on a CPU."""
    copies = _COPIES.get()
    return copies.of(weight) if copies is not None and is_mixed(weight) else None


def is_mixed(weight: Tensor) -> bool:
    """Whether autocast on a CPU multiplies by this float32 weight in bfloat16."""
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
    )


def mixed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Compute `inputs @ weight.T + bias` as autocast does, with the weight's copy.

    Args:
        inputs: [..., K], any type.
        weight: [N, K].
        bias: [N], or None.

    Returns:
        [..., N] bfloat16, or None if `narrow_copy` is.
    """
    copies, copy = _COPIES.get(), narrow_copy(weight)
    if copies is None or copy is None or inputs.device.type != "cpu":
        return None
    narrow = copies.narrow(inputs)
    product: Tensor = _MixedLinear.apply(inputs, weight, bias, narrow, copy)  # type: ignore[no-untyped-call]
    return product.view(*inputs.shape[:-1], weight.shape[0])


class _MixedLinear(torch.autograd.Function):
    """inputs [..., K], weight [N, K], bias [N], bfloat16 rows [T, K], bfloat16 weight -> [T, N] bfloat16."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, narrow: Tensor, copy: Tensor) -> Tensor:
        ctx.save_for_backward(narrow, copy)
        ctx.like = inputs.shape, inputs.dtype
        return functional.linear(narrow, copy, bias)  # autocast narrows the bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        narrow, copy = ctx.saved_tensors
        shape, dtype = ctx.like
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast("cpu", enabled=False):
            return (
                (grads @ copy).to(dtype).view(shape) if needs_inputs else None,
                (grads.T @ narrow).float() if needs_weight else None,
                grads.sum(0, dtype=torch.float32) if needs_bias else None,
                None,
                None,
            )
