"""An algorithm whose loss compares the two rows of a pair, and passes with a different price and layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.algorithm import LossOutput, LossTerm, RolloutAlgorithm
from rlhf_core.types import Experience
from rlhf_forward import PaddedPasses, policy_forward
from rlhf_forward.rows import PaddedRows


class PairMargin(RolloutAlgorithm):
    """Raises the log-prob of a prompt's first answer above the second one. The loss is a mean over pairs."""

    roles = frozenset({"policy"})  # type: ignore[assignment]
    terms = {"policy": LossTerm("policy")}  # type: ignore[assignment]

    def units(self, items: Sequence[Any]) -> list[list[Any]]:
        return [list(rows) for _, rows in groupby(items, key=lambda item: item.group_id)]

    def advantages(self, episode: Experience) -> Experience:
        return episode

    def counts(self, batch: Experience) -> Mapping[str, float]:
        return {"policy": sum(float(batch.action_mask[list(pair)].any()) for pair in self._pairs(batch))}

    def loss(self, models: Mapping[str, nn.Module], batch: Experience) -> LossOutput:
        sums = policy_forward(models["policy"], batch, 1.0).log_probs.sum(-1)
        losses = [nn.functional.softplus(sums[second] - sums[first]) for first, second in self._pairs(batch)]
        return LossOutput({"policy": torch.stack(losses).sum() if losses else 0.0 * sums.sum()})

    def _pairs(self, batch: Experience) -> list[tuple[int, int]]:
        rows: dict[int, list[int]] = {}
        for row, group in enumerate(batch.group_ids.tolist()):
            rows.setdefault(group, []).append(row)
        real = [pair for pair in rows.values() if batch.action_mask[pair].any()]
        assert all(len(pair) == 2 for pair in real), "a pair is split"
        return [(first, second) for first, second in real]


class Reversed:
    """The rows in reverse order. `of_actions` restores the order."""

    def __init__(self, rows: PaddedRows) -> None:
        self._rows = rows
        self._flipped = replace(
            rows,
            sequences=rows.sequences.flip(0),
            attention_mask=rows.attention_mask.flip(0),
            is_read=rows.is_read.flip(0),
        )
        self.inputs, self.lengths = self._flipped.inputs, self._flipped.lengths
        self.logits_to_keep = rows.logits_to_keep

    def of_actions(self, per_position: Tensor) -> Tensor:
        return self._rows.of_actions(per_position.flip(0))


class ReversedPasses(PaddedPasses):
    """Passes with a price without padding, and rows in reverse order."""

    entered = 0

    def price(self, rows: Sequence[Any]) -> int:
        return sum(row.num_tokens for row in rows)

    @contextmanager
    def applied(self, *models: nn.Module) -> Iterator[None]:
        type(self).entered += 1
        yield

    def lay_out(self, model: nn.Module, rows: PaddedRows) -> Reversed:
        return Reversed(rows)
