"""Norms that keep their input for the backward pass, and compute the normalised values again there.

The input is kept anyway, by the sum that it goes into. The same operations run again, so with the same results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .fast_linear import is_plain
from .replaced_forwards import replaced_forwards


@contextmanager
def lean_norms(*models: nn.Module) -> Iterator[None]:
    """Context in which transformers' RMS norms in `models` keep less for the backward pass of float32 CPU tensors.

    Use one context for a forward and its backward, since gradient checkpointing repeats the forward.
    """
    norms = (module for model in models for module in model.modules() if _is_norm(module))
    with replaced_forwards(norms, _forward):
        yield


def _is_norm(module: nn.Module) -> bool:
    kind, names = type(module), [name for name, _ in module.named_parameters()]
    return kind.__name__.endswith("RMSNorm") and kind.__module__.startswith("transformers.") and names == ["weight"]


def _forward(norm: Any, inputs: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and is_plain(inputs) and is_plain(norm.weight)):
        return type(norm).forward(norm, inputs)  # type: ignore[no-any-return]
    output: Tensor = _Recomputed.apply(inputs, norm.weight, norm)  # type: ignore[no-untyped-call]
    return output


class _Recomputed(torch.autograd.Function):
    """The norm of inputs [..., H]; weight [H] is its parameter."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, norm: Any) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.norm, ctx.weight = norm, weight
        return type(norm).forward(norm, inputs)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_inputs, needs_weight, _ = ctx.needs_input_grad
        inputs = ctx.saved_tensors[0].detach().requires_grad_(needs_inputs)
        wanted = [inputs] * needs_inputs + [ctx.weight] * needs_weight
        with torch.enable_grad():
            output = type(ctx.norm).forward(ctx.norm, inputs)
        found = list(torch.autograd.grad(output, wanted, grads))
        input_grad = found.pop(0) if needs_inputs else None
        return input_grad, found[0] if needs_weight else None, None
