"""Passes without padding: the samples of a batch are concatenated into a single row.

Everything in a transformer except attention treats tokens independently, so padding is wasted work there. Only
attention arranges the samples as rows, padded on the right. Each row contains only its own tokens, so a causal mask
is sufficient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_forward.masking import position_ids_of
from rlhf_forward.shared_pass import packs

if TYPE_CHECKING:
    from rlhf_forward.rows import PaddedRows

ATTENTION = "rlhf_packed"
"""Name of the attention function in transformers: `sdpa` with support for packed samples."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Mapping between the T tokens of one packed row and B rows of width W, padded on the right.

    Example:
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> packing = Packing.of(mask)
        >>> packing.places.tolist(), packing.num_rows, packing.width
        ([0, 1, 3, 4, 5], 2, 3)
    """

    places: Tensor
    """[T] int64, indices into the flattened B * W."""
    num_rows: int
    width: int

    @classmethod
    def of(cls, attention_mask: Tensor) -> Packing:
        """Create the mapping for `attention_mask`, [B, S] bool, True for tokens."""
        lengths = attention_mask.sum(1)
        width = int(lengths.max())
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        return cls(rows * width + position_ids_of(attention_mask)[attention_mask], len(lengths), width)

    def as_rows(self, packed: Tensor) -> Tensor:
        """Unpack [1, H, T, D] to [B, H, W, D], with 0 on padding."""
        tokens = packed[0].transpose(0, 1)
        rows: Tensor = _Spread.apply(tokens, self.places, self.num_rows * self.width)  # type: ignore[no-untyped-call]
        return rows.view(self.num_rows, self.width, *tokens.shape[1:]).transpose(1, 2)

    def as_packed(self, rows: Tensor) -> Tensor:
        """Pack [B, W, H, D] to [1, T, H, D]."""
        return rows.flatten(0, 1).index_select(0, self.places)[None]

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None, options: Mapping[str, Any]
    ) -> Tensor | None:
        """Compute attention without rows, [1, T, H, D]. None if it needs rows."""
        return None


class PackedRows:
    """All samples in one row without padding, for a model inside `packed_attention`."""

    def __init__(self, rows: PaddedRows) -> None:
        is_token = rows.attention_mask
        self.inputs: dict[str, Any] = {
            "input_ids": rows.sequences[is_token][None],
            # Four dimensions: transformers treats it as a complete mask and does not build a T x T one.
            # Size zero: attention without packing support fails instead of mixing samples.
            "attention_mask": is_token.new_ones(1, 1, 0, 0),
            "position_ids": position_ids_of(is_token)[is_token][None],
            "packing": Packing.of(is_token),
        }
        self.lengths: Tensor = rows.lengths.expand_as(is_token)[is_token][None]
        """[1, T] int64: for each token, the number of tokens in its sample."""
        self.logits_to_keep: Tensor = rows.is_read[is_token].nonzero()[:, 0]
        """[N] int64: the position before each action."""

    def of_actions(self, per_position: Tensor) -> Tensor:
        """Select the positions before actions, [N, ...], from [1, T, ...], or [1, N, ...] if already selected.

        N is not T: prompts are never empty, and `SharedRows` checks it.
        """
        if per_position.shape[1] == len(self.logits_to_keep):
            return per_position[0]
        return per_position[0, self.logits_to_keep]


class _Spread(torch.autograd.Function):
    """Scatter tokens [T, ...] to `places` [T] of [size, ...], 0 elsewhere. torch's own would keep the tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        # `index_add_` to zeros is faster on a CPU than `index_copy_`.
        return tokens.new_zeros(size, *tokens.shape[1:]).index_add_(0, places, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads.index_select(0, places), None, None


@contextmanager
def packed_attention(*models: nn.Module) -> Iterator[None]:
    """Context in which supported transformers models among `models` accept packed rows (`PackedRows`).

    Only models with `sdpa` attention are supported. Unpacked rows are unaffected. Use one context for a forward and its
    backward, since gradient checkpointing repeats the forward.
    """
    configs = _packable_configs(models)
    if configs:
        _register()
    try:
        for config in configs:
            config._attn_implementation = ATTENTION
        yield
    finally:
        for config in configs:
            config._attn_implementation = "sdpa"


def _packable_configs(models: Sequence[nn.Module]) -> list[Any]:
    configs = {id(each): each for model in models for module in model.modules() if (each := _config_of(module))}
    return [config for config in configs.values() if packs(config)]


def _config_of(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if hasattr(config, "model_type") else None


def takes_packed_rows(model: nn.Module) -> bool:
    """Whether a model currently accepts packed rows: `packed_attention` is active for it.

    Args:
        model: innermost model. Its attribute `takes_packed_rows`, if set, decides (a critic follows its trunk).
    """
    declared = getattr(model, "takes_packed_rows", None)
    if declared is not None:
        return bool(declared)
    is_active = getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION
    # Remote code (`trust_remote_code`) may use the model type llama but ignore unknown arguments.
    return is_active and type(model).forward.__module__.startswith("transformers.models.")


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packing: Packing | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if packing is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        direct = packing.attention(query, key, value, sliding_window, options)
        if direct is not None:
            return direct, None
        query, key, value = packing.as_rows(query), packing.as_rows(key), packing.as_rows(value)
        mask = None
        if sliding_window is not None and sliding_window < packing.width:
            mask = _window(packing.width, sliding_window, query.device)
        output, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        return packing.as_packed(output), None

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _window(width: int, size: int, device: torch.device) -> Tensor:
    """[1, 1, W, W] bool: each token sees itself and the `size - 1` before it."""
    places = torch.arange(width, device=device)
    distance = places[:, None] - places
    return ((distance >= 0) & (distance < size))[None, None]
