"""The two passes of the fast path: prefill of full prompts, then decoding of one token per row over the slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from .cache import Layers, SlotCache, layers_of
from .forward import ModelForward
from .grouped import grouped_attention
from .prefixes import Prefix


class SlotModel:
    """A causal LM with a `SlotCache`. Rows are identified by their slot."""

    def __init__(self, forward: ModelForward, num_slots: int, max_tokens: int, token_limit: int | None = None) -> None:
        """`token_limit`: upper bound to which a slot may grow, by default `max_tokens`."""
        self._forward = forward
        self.num_slots = num_slots
        self.cache = SlotCache(num_slots, max_tokens, token_limit)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Layers]:
        """Compute next-token logits [B, V] of the prompts, and their keys and values.

        Prompts are padded on the right. Under a causal mask real tokens never see the padding, so another mask is not
        needed and the fastest attention kernel is used.
        """
        positions = torch.arange(max(map(len, prompts)), device=self._forward.device).expand(len(prompts), -1)
        return self._run_padded(prompts, positions, DynamicCache())

    def extend(self, prefixes: Sequence[Prefix], suffixes: Sequence[Sequence[int]]) -> tuple[Tensor, Layers]:
        """Compute next-token logits [B, V] of prompts with cached prefixes, and keys and values of the full prompts.

        In the pass, prefixes are padded on the left and suffixes on the right, so that each row is contiguous.
        """
        device = self._forward.device
        known = torch.tensor([prefix.num_tokens for prefix in prefixes], device=device)
        lengths = [len(suffix) for suffix in suffixes]
        past, longest = max(prefix.num_tokens for prefix in prefixes), max(lengths)
        cache = DynamicCache()
        for number, layer in enumerate(zip(*(prefix.layers for prefix in prefixes), strict=True)):
            keys, values = (
                torch.stack([functional.pad(states, (0, 0, past - states.shape[1], 0)) for states in each])
                for each in zip(*layer, strict=True)
            )
            cache.update(keys, values, number)
        columns = torch.arange(past + longest, device=device)
        seen = (columns >= past - known[:, None, None]) & (
            columns <= past + torch.arange(longest, device=device)[:, None]
        )
        last = self._forward.context_tokens
        positions = (known[:, None] + torch.arange(longest, device=device)).clamp(
            max=None if last is None else last - 1
        )
        logits, padded = self._run_padded(suffixes, positions, cache, self._additive(seen)[:, None])
        max_total = int((known + torch.tensor(lengths, device=device)).max())
        places = (past - known[:, None] + torch.arange(max_total, device=device)).clamp(max=past + longest - 1)

        def align(states: Tensor) -> Tensor:
            return states.gather(2, places[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))

        return logits, [(align(keys), align(values)) for keys, values in padded]

    def _run_padded(
        self, rows: Sequence[Sequence[int]], positions: Tensor, cache: DynamicCache, mask: Tensor | None = None
    ) -> tuple[Tensor, Layers]:
        """Logits [B, V] at the last token of each right-padded row, and the keys and values after the pass."""
        lengths, device = [len(row) for row in rows], self._forward.device
        ends = sorted(set(lengths))
        logits, cache = self._forward(
            torch.tensor([[*row, *([0] * (ends[-1] - len(row)))] for row in rows], device=device),
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            keep=torch.tensor([end - 1 for end in ends], device=device),
        )
        columns = torch.tensor([ends.index(length) for length in lengths], device=device)
        return logits[torch.arange(len(rows), device=device), columns], layers_of(cache)

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Feed one token per row to the first n slots, whose rows have `lengths` tokens, and return logits [n, V]."""
        longest, device = max(lengths) + 1, self._forward.device
        positions = torch.tensor(lengths, device=device)
        self.cache.begin_step(positions, longest)
        seen = torch.arange(longest, device=device) <= positions[:, None]
        with grouped_attention(self._forward.config):
            logits, _ = self._forward(
                torch.tensor(token_ids, device=device)[:, None],
                position_ids=positions[:, None],
                attention_mask=self._additive(seen)[:, None, None, :],
                cache=self.cache,
                use_cache=True,
            )
        return logits[:, -1]

    def _additive(self, seen: Tensor) -> Tensor:
        """Additive mask for attention scores: 0 for visible tokens, the lowest finite number for others."""
        mask = torch.zeros(seen.shape, dtype=self._forward.dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
