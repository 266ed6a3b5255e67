"""Gradients of a vocabulary's weights, added to `.grad` directly in the backward pass.

The embedding's gradient is zero except in the rows of a pass's tokens, and the head's gradient is equally large. torch
allocates a full matrix for each in every pass, and with tied weights keeps the head's until the embedding's is
computed. Here the embedding adds only its rows, and the head adds a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlhf_forward.replaced_forwards import Forward, replaced_forwards

from .fast_linear import is_fast, is_plain, linear_product, multiply
from .mixed_linear import mixed_linear

BLOCK_ELEMENTS = 1 << 22
"""Number of elements of a head's gradient computed at a time: 16 MB in float32."""


@contextmanager
def direct_gradients(model: nn.Module) -> Iterator[None]:
    """Context in which backward passes add directly to `.grad` of a model's embedding and head.

    Use it only if nothing but the optimizer waits for gradients: neither hooks on these two weights nor the hooks of
    distributed wrappers that reduce gradients are called. Weights other than float32 on a CPU are left alone. Use one
    context for a forward and its backward.

    Args:
        model: transformers model.

    Yields:
        Nothing. The original forwards are restored afterwards.
    """
    embedding, head = find_submodule(model, "get_input_embeddings"), find_submodule(model, "get_output_embeddings")
    replaced: list[tuple[nn.Module, Forward]] = []
    if type(embedding) is nn.Embedding and _is_plain_embedding(embedding) and _owns_gradient(embedding):
        replaced.append((embedding, partial(_embed, embedding)))
    if type(head) is nn.Linear and head.bias is None and _owns_gradient(head):
        replaced.append((head, partial(_project, head)))
    with replaced_forwards(replaced):
        yield


def adds_directly(head: nn.Linear) -> bool:
    """Whether `direct_gradients` is active for this head."""
    return getattr(vars(head).get("forward"), "func", None) is _project


def find_submodule(model: nn.Module, name: str) -> object:
    """Result of the model's method `name`, such as `get_output_embeddings`, or None if it lacks the method."""
    find = getattr(model, name, None)
    return find() if callable(find) else None


def _owns_gradient(module: nn.Embedding | nn.Linear) -> bool:
    weight, forward = module.weight, vars(module).get("forward")
    watched = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    is_itself = forward is None or is_fast(forward)
    return isinstance(weight, nn.Parameter) and is_plain(weight) and weight.requires_grad and is_itself and not watched


def _is_plain_embedding(embedding: nn.Embedding) -> bool:
    return not embedding.sparse and not embedding.scale_grad_by_freq and embedding.max_norm is None


def _embed(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    rows: Tensor = _Rows.apply(ids, embedding.weight, embedding.padding_idx)  # type: ignore[no-untyped-call]
    return rows


def _project(head: nn.Linear, hidden: Tensor) -> Tensor:
    mixed = mixed_linear(hidden, head.weight, None)
    if mixed is not None:
        return mixed
    if not is_plain(hidden) or torch.is_autocast_enabled("cpu"):
        return functional.linear(hidden, head.weight)
    logits: Tensor = _Product.apply(hidden.flatten(0, -2), head.weight)  # type: ignore[no-untyped-call]
    return logits.view(*hidden.shape[:-1], logits.shape[-1])


def total_gradient(weight: Tensor) -> Tensor:
    """Return `weight.grad`, set to zeros first if it is None."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def add_head_gradient(weight: Tensor, grads: Tensor, hidden: Tensor) -> None:
    """Add the gradient of `hidden @ weight.T` to `weight.grad`. `grads`: [T, V] of the products, `hidden`: [T, H]."""
    total, size = total_gradient(weight), max(1, BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], size):
        block = slice(start, start + size)
        total[block] += multiply(grads[:, block].T, hidden)


class _Rows(torch.autograd.Function):
    """ids [...] int64, weight [V, H] -> [..., H]."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[None, None, None]:
        ids = ctx.saved_tensors[0].flatten()
        rows = grads.reshape(len(ids), -1)
        if ctx.padding is not None:
            counted = ids != ctx.padding
            ids, rows = ids[counted], rows[counted]
        total_gradient(ctx.weight).index_add_(0, ids, rows)
        return None, None, None


class _Product(torch.autograd.Function):
    """hidden [T, H], weight [V, H] -> [T, V]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.weight = weight
        return linear_product(hidden, weight, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, None]:
        (hidden,) = ctx.saved_tensors
        hidden_grad = multiply(grads, ctx.weight.detach()) if ctx.needs_input_grad[0] else None
        add_head_gradient(ctx.weight, grads, hidden)
        return hidden_grad, None
