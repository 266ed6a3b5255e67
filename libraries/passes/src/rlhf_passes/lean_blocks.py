"""Blocks that keep fewer tensors for the backward pass and recompute the rest there, with the same operations.

Gated MLPs, `down(act(gate(x)) * up(x))`, keep two intermediate results instead of four. The activation and the product
with it are as large as the gate and up projections, and together make up nearly half of the memory that a pass keeps.
Norms keep only their input, which the residual sum keeps anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlhf_forward.architectures import with_trait
from rlhf_forward.replaced_forwards import forwards_of, replaced_forwards

from .fast_linear import is_plain, linear_product, multiply
from .mixed_linear import narrow_copy

_GATED_IN = frozenset(f"transformers.models.{name}.modeling_{name}" for name in with_trait("gated-mlp"))

Activation = Callable[[Tensor], Tensor]


def lean_mlps(*models: nn.Module) -> AbstractContextManager[None]:
    """Context in which the gated MLPs of `models` keep fewer tensors for the backward pass (CPU, float32 weights).

    Use one context for a forward and its backward, since gradient checkpointing repeats the forward.
    """
    return replaced_forwards(forwards_of(models, _is_gated, _mlp_forward))


def lean_norms(*models: nn.Module) -> AbstractContextManager[None]:
    """Context in which transformers' RMS norms in `models` keep fewer tensors for the backward pass (float32, CPU).

    Use one context for a forward and its backward, since gradient checkpointing repeats the forward.
    """
    return replaced_forwards(forwards_of(models, _is_norm, _norm_forward))


def _is_gated(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__ in _GATED_IN and kind.__name__.endswith("MLP")


def _mlp_forward(mlp: Any, inputs: Tensor) -> Tensor:
    down = mlp.down_proj
    copy = narrow_copy(down.weight) if _is_bare(down) else None
    is_unsupported = copy is None and torch.is_autocast_enabled("cpu")
    if not (torch.is_grad_enabled() and is_plain(inputs) and _is_bare(down)) or is_unsupported:
        return type(mlp).forward(mlp, inputs)  # type: ignore[no-any-return]
    gate, up = (part(inputs).flatten(0, -2) for part in (mlp.gate_proj, mlp.up_proj))
    output: Tensor = _GatedDown.apply(gate, up, down.weight, down.bias, mlp.act_fn, copy)  # type: ignore[no-untyped-call]
    return output.view(*inputs.shape[:-1], output.shape[-1])


def _is_bare(module: nn.Module) -> bool:
    """Whether it is a plain Linear without an adapter or hooks."""
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is nn.Linear and is_plain(module.weight) and not watched


class _GatedDown(torch.autograd.Function):
    """gate and up [T, I], weight [N, I], bias [N] -> (act(gate) * up) @ weight.T + bias: [T, N].

    `copy`: the weight in the type of gate and up, if they are narrower.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation,
        copy: Tensor | None,
    ) -> Tensor:
        used = weight if copy is None else copy
        ctx.save_for_backward(gate, up, used)
        ctx.activation = activation
        return linear_product(activation(gate) * up, used, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        with torch.enable_grad():
            product = ctx.activation(gate) * up
        weight_grad = multiply(grads.T, product.detach()).float() if needs_weight else None
        gate_grad = up_grad = None
        if needs_gate or needs_up:
            gate_grad, up_grad = torch.autograd.grad(product, (gate, up), multiply(grads, weight))
        bias_grad = grads.sum(0, dtype=torch.float32) if needs_bias else None
        return gate_grad, up_grad, weight_grad, bias_grad, None, None


def _is_norm(module: nn.Module) -> bool:
    kind, names = type(module), [name for name, _ in module.named_parameters()]
    return kind.__name__.endswith("RMSNorm") and kind.__module__.startswith("transformers.") and names == ["weight"]


def _norm_forward(norm: Any, inputs: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and is_plain(inputs) and is_plain(norm.weight)):
        return type(norm).forward(norm, inputs)  # type: ignore[no-any-return]
    output: Tensor = checkpoint(type(norm).forward, norm, inputs, use_reentrant=False, preserve_rng_state=False)
    return output
