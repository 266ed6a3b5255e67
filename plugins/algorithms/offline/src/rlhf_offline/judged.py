"""Judged answers: good or bad each, alone on a line or two of one pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .examples import Example, ExampleBatch, collate_examples


@dataclass(frozen=True, slots=True)
class Judged:
    """The answers of one line, unpadded: one, or a chosen and a rejected one."""

    answers: tuple[Example, ...]
    good: tuple[bool, ...]
    counts: bool = True
    """False for a filler that must not count."""
    reference: Tensor | None = None
    """[2] float32: the reference's log-prob of each answer, 0 where there is no second."""

    @property
    def num_tokens(self) -> int:
        """Tokens of its rows, padded to the longest."""
        return len(self.answers) * max(example.num_tokens for example in self.answers)

    def masked(self) -> Judged:
        """The same with `counts` False."""
        return replace(self, counts=False)


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """The R answers of some items as padded rows, item by item."""

    examples: ExampleBatch
    good: Tensor
    """[R] bool."""
    counts: Tensor
    """[R] bool, True = counts in the loss."""
    item: Tensor
    """[R] int64, the item that a row belongs to."""
    side: Tensor
    """[R] int64, 0 for its first row and 1 for its second."""
    pairs: Tensor
    """[N, 2] int64, the rows of items that are pairs: chosen, rejected."""
    reference: Tensor | None
    """[R] float32 nats."""
    num_items: int

    def __len__(self) -> int:
        return self.num_items

    def by_item(self, values: Tensor) -> Tensor:
        """[R] -> [number of items, 2], 0 where an item has one row."""
        return values.new_zeros(self.num_items, 2).index_put((self.item, self.side), values)


def collate_judged(items: Sequence[Judged]) -> JudgedBatch:
    """Padded to the longest row. Reference values are present for all items or none."""
    rows = [(index, side) for index, item in enumerate(items) for side in range(len(item.answers))]
    starts = {index: row for row, (index, side) in enumerate(rows) if side == 0}
    pairs = [(starts[index], starts[index] + 1) for index, item in enumerate(items) if len(item.answers) == 2]
    known = [item.reference for item in items]
    place = torch.tensor(rows, dtype=torch.int64)
    return JudgedBatch(
        collate_examples([items[index].answers[side] for index, side in rows]),
        good=torch.tensor([items[index].good[side] for index, side in rows]),
        counts=torch.tensor([items[index].counts for index, _ in rows]),
        item=place[:, 0],
        side=place[:, 1],
        pairs=torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
        reference=None
        if any(each is None for each in known)
        else torch.stack([each[side] for index, side in rows if (each := known[index]) is not None]),
        num_items=len(items),
    )


def mismatched(items: Sequence[Judged]) -> list[Judged]:
    """Each item's prompt with an answer to the next item's: its first and its second row in turn."""
    turned = [*items[1:], items[0]]
    sides = [item.answers[index % len(item.answers)] for index, item in enumerate(turned)]
    return [Judged((_with_answer(item.answers[0], other),), (True,)) for item, other in zip(items, sides, strict=True)]


def _with_answer(prompt: Example, answer: Example) -> Example:
    before, after = prompt.input_ids[~prompt.loss_mask], answer.input_ids[answer.loss_mask]
    return Example(torch.cat([before, after]), torch.arange(len(before) + len(after)) >= len(before))
