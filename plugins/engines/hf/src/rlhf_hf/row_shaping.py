"""Penalties and banned tokens of a decoding row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.types import GenerationRequest
from rlhf_forward import BannedWords, penalized, request_shaping, without_banned


@dataclass(slots=True, eq=False)
class RowShaping:
    """How the distribution of a row's tokens differs from that of its logits, and the tokens that it has so far."""

    min_p: float
    repetition: float
    presence: float
    banned: BannedWords | None
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    """The tokens of the answer so far, of its row."""
    seen: Tensor | None = None
    """[V] bool: tokens of the prompt and the answer. None before the first token."""
    generated: Tensor | None = None
    """[V] bool: tokens of the answer."""

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        banned: BannedWords | None,
        token_ids: Sequence[int],
        *,
        where: str,
    ) -> RowShaping | None:
        """Return the shaping of a request, or None if all is off. Raises `DataError` for an invalid option."""
        min_p, repetition, presence = request_shaping(request, where=where)
        is_off = (min_p, repetition, presence, banned) == (0.0, 1.0, 0.0, None)
        return None if is_off else cls(min_p, repetition, presence, banned, request.prompt_ids, token_ids)

    @property
    def penalizes(self) -> bool:
        return self.repetition != 1.0 or self.presence != 0.0

    def start(self, logits: Tensor) -> None:
        """Remember the prompt, before the first token."""
        self.seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        self.generated = torch.zeros_like(self.seen)
        self.seen[torch.tensor(self.prompt_ids, device=logits.device)] = True

    def add(self, token: int) -> None:
        """Remember a sampled token."""
        if self.seen is not None and self.generated is not None:
            self.seen[token] = self.generated[token] = True


def shaped_rows(logits: Tensor, shapings: Sequence[RowShaping]) -> Tensor:
    """Return the logits [n, V] that the next tokens of rows are sampled from, before the temperature."""
    for each in shapings:
        if each.penalizes and each.seen is None:
            each.start(logits)
    if any(each.penalizes for each in shapings):
        none = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        logits = penalized(
            logits,
            seen=torch.stack([none if each.seen is None else each.seen for each in shapings]),
            generated=torch.stack([none if each.generated is None else each.generated for each in shapings]),
            repetition=torch.tensor([[each.repetition] for each in shapings], device=logits.device),
            presence=torch.tensor([[each.presence] for each in shapings], device=logits.device),
        )
    if shapings[0].banned is not None:
        banned = [each.banned.after(each.token_ids, len(each.token_ids)) for each in shapings if each.banned]
        logits = without_banned(logits, torch.tensor(banned, device=logits.device))
    return logits
