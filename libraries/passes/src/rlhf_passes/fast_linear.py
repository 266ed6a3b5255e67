"""float32 matrix products on a CPU with oneDNN instead of MKL, on machines on which that is faster (`products.py`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlhf_forward.replaced_forwards import forwards_of, replaced_forwards

from .mixed_linear import mixed_linear
from .products import uses_onednn

MIN_MULTIPLICATIONS = 1 << 22
"""Minimum size of a product. Below it the call overhead exceeds the gain. Constant, so runs are bitwise repeatable."""
_PLAIN = (Tensor, nn.Parameter)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Compute `left @ right`, [M, K] x [K, N], without gradient. Any strides, dtype and device."""
    if is_plain(left) and is_plain(right) and _is_worthwhile(left, right.shape[1]):
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right.T, None, "none", [], "")
        return product
    return left @ right


def linear_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `inputs @ weight.T + bias` as `fast_linears` does, without recording a gradient.

    Args:
        inputs: [T, K], any dtype and device.
        weight: [N, K].
        bias: [N], or None.

    Returns:
        The product, [T, N].

    Example:
        >>> linear_product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.5]))
        tensor([[11.5000]])
    """
    if _can_multiply(inputs, weight, bias):
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, weight, bias, "none", [], "")
        return product
    return functional.linear(inputs, weight, bias)


def fast_linears(*models: nn.Module) -> AbstractContextManager[None]:
    """Context in which the `nn.Linear`s of `models` multiply float32 CPU tensors with oneDNN. All else is unchanged.

    Under bfloat16 autocast and inside `narrow_copies` they multiply by copies of the weights.

    Use one context for a forward and its backward, since gradient checkpointing repeats the forward.
    """
    return replaced_forwards(forwards_of(models, _is_plain_linear, _forward))


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and is_plain(module.weight)


def is_fast(forward: object) -> bool:
    """Whether `forward` is the replacement installed by `fast_linears`."""
    return getattr(forward, "func", None) is _forward


def _forward(linear: nn.Linear, inputs: Tensor) -> Tensor:
    weight, bias = linear.weight, linear.bias
    mixed = mixed_linear(inputs, weight, bias)
    if mixed is not None:
        return mixed
    if not _can_multiply(inputs, weight, bias):
        return functional.linear(inputs, weight, bias)
    product: Tensor = _Linear.apply(inputs.reshape(-1, inputs.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
    return product.view(*inputs.shape[:-1], weight.shape[0])


def _can_multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        all(is_plain(tensor) for tensor in (inputs, weight, bias) if tensor is not None)
        and not torch.is_autocast_enabled("cpu")
        and _is_worthwhile(inputs, weight.shape[0])
    )


def _is_worthwhile(left: Tensor, num_columns: int) -> bool:
    return left.numel() * num_columns >= MIN_MULTIPLICATIONS and uses_onednn()


def is_plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary float32 CPU tensor. Sharded and quantized subclasses have their own multiplication."""
    return type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.dtype is torch.float32


class _Linear(torch.autograd.Function):
    """inputs [T, K], weight [N, K], bias [N] -> [T, N]."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return linear_product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            multiply(grads, weight) if needs_inputs else None,
            multiply(grads.T, inputs) if needs_weight else None,
            grads.sum(0) if needs_bias else None,
        )
