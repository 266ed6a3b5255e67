"""Faster and smaller training passes with the same results: packing, fast products, and fewer kept activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
from .packing import PackedRows, packed_attention, takes_packed_rows
from .shared_plan import shared_plan
from .shared_rows import SharedRows

MAX_SHARED_TOKENS = 1024
"""Maximum number of tokens of a pass over the answers to one prompt, unless the run file sets a maximum.

The default for a large model on a CPU is too small to share prompts. It saves memory that sharing saves, too.
"""


class FastPasses(PaddedPasses):
    """Rows without padding, faster matrix products and fewer tensors kept for the backward pass, if supported."""

    @contextmanager
    def applied(self, *models: nn.Module) -> Iterator[None]:
        # Small models keep everything: saving memory would take more time than their arithmetic.
        large = [model for model in models if saves_memory(model)]
        with fast_linears(*models), lean_mlps(*large), lean_norms(*large), packed_attention(*models):
            yield

    def plan(
        self, units: Sequence[Sequence[Any]], max_tokens: int | None, place: Place, *models: nn.Module
    ) -> list[list[int]]:
        planned = None
        if _all_share(models):
            size = max(map(place.num_parameters, models))
            tokens = max_tokens or default_micro_batch_tokens(place.device.type, size)
            planned = shared_plan(units, tokens, max_tokens or max(tokens, MAX_SHARED_TOKENS))
        return planned or super().plan(units, max_tokens, place, *models)

    def lay_out(self, model: nn.Module, rows: PaddedRows) -> PaddedRows | PackedRows:
        if not takes_packed_rows(model):
            return rows
        return (SharedRows.of(rows) if _has_one_embedding(model) else None) or PackedRows(rows)

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
