"""Faster and smaller training passes with the same results: packing, fast products, and fewer kept activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.batching import default_micro_batch_tokens, fills_host_memory
from rlhf_core.models.forward_passes import applying
from rlhf_core.models.kinds import model_kind_of
from rlhf_core.place import Place
from rlhf_forward.logits import innermost
from rlhf_forward.padded_passes import ActionLabels, PaddedPasses, plain_log_probs
from rlhf_forward.row_lengths import length_switches
from rlhf_forward.rows import PaddedRows

from .fast_linear import fast_linears
from .lean_blocks import lean_mlps, lean_norms
from .lean_head import can_be_lean, has_plain_logits, lean_head
from .lean_logits import can_reuse, lean_log_probs
from .mixed_linear import NarrowCopies, narrow_copies
from .packing import PackedRows, packed_attention, takes_packed_rows
from .products import multiplies_bfloat16_fast
from .shared_plan import shared_plan
from .shared_rows import MIN_SAVED_SHARE, SharedRows

MAX_SHARED_TOKENS = 1024
"""Maximum number of tokens of a pass over the answers to one prompt, unless the run file sets a maximum.

The default for a large model on a CPU is too small to share prompts. It saves memory that sharing saves, too.
"""

MIXED_TOKENS = 512
"""The default for a large model on a CPU that multiplies bfloat16 fast: products of fewer tokens take less time than
reading and adding the gradients of the weights. Activations in bfloat16 take half of the memory."""


class FastPasses(PaddedPasses):
    """Rows without padding, faster matrix products and fewer tensors kept for the backward pass, if supported."""

    def __init__(self) -> None:
        self._copies: NarrowCopies | None = None
        """Copies for the passes of one plan. None before the first plan: each pass has its own."""

    @contextmanager
    def applied(self, *models: nn.Module) -> Iterator[None]:
        # Small models keep everything: saving memory would take more time than their arithmetic.
        large = [model for model in models if saves_memory(model)]
        with (
            narrow_copies(self._copies or NarrowCopies()),
            fast_linears(*models),
            lean_mlps(*large),
            lean_norms(*large),
            packed_attention(*models),
        ):
            yield

    def plan(
        self, units: Sequence[Sequence[Any]], max_tokens: int | None, place: Place, *models: nn.Module
    ) -> list[list[int]]:
        self._copies = NarrowCopies()  # weights may have changed since the previous plan
        size = max(map(place.num_parameters, models))
        tokens = max_tokens or default_pass_tokens(place.device.type, size, place.compute_dtype)
        planned = None
        if _all_share(models):
            planned = shared_plan(units, tokens, max_tokens or max(tokens, MAX_SHARED_TOKENS))
        return planned or super().plan(units, tokens, place, *models)

    def lay_out(self, model: nn.Module, rows: PaddedRows) -> PaddedRows | PackedRows:
        if not takes_packed_rows(model):
            return rows
        shared = None
        if _has_one_embedding(model):
            # torch's attention over rows in bfloat16 is slow on a CPU.
            is_mixed = torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
            shared = SharedRows.of(rows, min_saved_share=0.0 if is_mixed else MIN_SAVED_SHARE)
        return shared or PackedRows(rows)

    def log_probs(
        self, model: nn.Module, rows: Any, run: Callable[[], Tensor], wanted: ActionLabels
    ) -> tuple[Tensor, Tensor | None]:
        labels, temperature, with_entropy, entropy_grad = wanted
        if can_be_lean(model, len(labels)):
            with lean_head(model, rows.of_actions, labels, temperature, with_entropy=with_entropy):
                log_probs, entropies = run().unbind(-1)
            return log_probs, entropies if entropy_grad else entropies.detach()
        logits = rows.of_actions(run())
        if not (has_plain_logits(model) and can_reuse(logits)):
            return plain_log_probs(logits, wanted)
        return lean_log_probs(logits, labels, temperature, with_entropy=with_entropy, entropy_grad=entropy_grad)


def default_pass_tokens(device_type: str, num_parameters: int, dtype: torch.dtype | None) -> int:
    """Return the maximum number of tokens of a pass if the run file sets none.

    Args:
        device_type: Device of the pass.
        num_parameters: Parameters of the model.
        dtype: Type of matrix products, None for the type of the weights.

    Example:
        >>> default_pass_tokens("cuda", 500_000_000, torch.bfloat16)
        16384
    """
    is_large = fills_host_memory(device_type, num_parameters)
    if is_large and dtype is torch.bfloat16 and multiplies_bfloat16_fast():
        return MIXED_TOKENS
    return default_micro_batch_tokens(device_type, num_parameters)


def fast_passes(*models: nn.Module) -> AbstractContextManager[None]:
    """Context in which forward and backward passes of `models` use `FastPasses`."""
    passes = FastPasses()
    return applying(passes, passes.applied(*models))


def _all_share(models: Sequence[nn.Module]) -> bool:
    """Whether all models receive packed rows, with nothing that differs between rows of the same beginning."""
    with packed_attention(*models):
        return all(
            takes_packed_rows(each) and _has_one_embedding(each) and not model_kind_of(each).inputs_differ
            for each in map(innermost, models)
        )


def _has_one_embedding(model: nn.Module) -> bool:
    """Whether a token's embedding does not depend on the length of its row."""
    return length_switches(model) is None


def saves_memory(model: nn.Module) -> bool:
    """Whether passes through `model` should save host memory: large models on a CPU, for which this costs little."""
    parameters = list(model.parameters())
    return bool(parameters) and fills_host_memory(
        parameters[0].device.type, sum(parameter.numel() for parameter in parameters)
    )
