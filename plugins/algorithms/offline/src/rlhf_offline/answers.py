"""The answers of a line: one, or a chosen and a rejected one, and what the reference says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor

from .examples import Example, ExampleBatch, collate_examples


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one line, unpadded."""

    answers: tuple[Example, ...]
    """One, or the chosen and the rejected one."""
    good: tuple[bool, ...] = (True, False)
    margin: float = 0.0
    """By how much the chosen answer's score should exceed the rejected one's."""
    counts: bool = True
    """False for a filler that must not count."""
    reference: Tensor | None = None
    """[2] float32: the reference model's value of each answer, 0 where there is no second."""

    @property
    def num_tokens(self) -> int:
        """Tokens of its rows, padded to the longest."""
        return len(self.answers) * max(example.num_tokens for example in self.answers)

    def masked(self) -> Answers:
        """The same with `counts` False."""
        return replace(self, counts=False)


@dataclass(frozen=True, slots=True)
class AnswersBatch:
    """N lines as R padded rows: the first answer of each line, then the second ones of lines with two."""

    examples: ExampleBatch
    line: Tensor
    """[R] int64, the line that a row belongs to."""
    good: Tensor
    """[R] bool."""
    counts: Tensor
    """[N] bool, True = counts in the loss."""
    margins: Tensor
    """[N] float32."""
    reference: Tensor | None
    """[R] float32."""

    def __len__(self) -> int:
        return int(self.counts.numel())

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """[R] -> values of the chosen and of the rejected answers, [P] each, of the P lines with two."""
        number = len(self)
        return values[self.line[number:]], values[number:]

    def by_line(self, values: Tensor) -> Tensor:
        """[R] -> [N, 2], 0 where a line has one row."""
        number = len(self)
        second = values.new_zeros(number).index_put((self.line[number:],), values[number:])
        return torch.stack([values[:number], second], dim=-1)


def collate_answers(lines: Sequence[Answers], *, pad_id: int = 0) -> AnswersBatch:
    """Padded to the longest row. Reference values are present for all lines or none."""
    places = [(index, side) for side in (0, 1) for index, line in enumerate(lines) if side < len(line.answers)]
    known = [line.reference for line in lines if line.reference is not None]
    return AnswersBatch(
        collate_examples([lines[index].answers[side] for index, side in places], pad_id=pad_id),
        line=torch.tensor([index for index, _ in places]),
        good=torch.tensor([lines[index].good[side] for index, side in places]),
        counts=torch.tensor([line.counts for line in lines]),
        margins=torch.tensor([line.margin for line in lines], dtype=torch.float32),
        reference=torch.stack([known[index][side] for index, side in places]) if len(known) == len(lines) else None,
    )


def mismatched(lines: Sequence[Answers]) -> list[Answers]:
    """Each line's prompt with an answer to the next line's: its first and its second row in turn."""
    turned = [*lines[1:], lines[0]]
    sides = [line.answers[index % len(line.answers)] for index, line in enumerate(turned)]
    return [Answers((_with_answer(line.answers[0], other),), (True,)) for line, other in zip(lines, sides, strict=True)]


def _with_answer(prompt: Example, answer: Example) -> Example:
    before, after = prompt.input_ids[~prompt.loss_mask], answer.input_ids[answer.loss_mask]
    return Example(torch.cat([before, after]), torch.arange(len(before) + len(after)) >= len(before))


class KnownReference:
    """The reference's values of answers: it is asked once for each line, whatever the number of epochs."""

    def __init__(self) -> None:
        self._known: dict[bytes, Tensor] = {}

    def fill(self, lines: Sequence[Answers], ask: Callable[[Sequence[Answers]], Sequence[Tensor]]) -> list[Answers]:
        """The same lines with `reference`; `ask` is given those that are not known yet."""
        keys = [_digest(line) for line in lines]
        unknown = {key: line for key, line in zip(keys, lines, strict=True) if key not in self._known}
        self._known.update(zip(unknown, ask(list(unknown.values())), strict=True))
        return [replace(line, reference=self._known[key]) for key, line in zip(keys, lines, strict=True)]


def _digest(line: Answers) -> bytes:
    ids: list[int] = []
    for example in line.answers:
        ids += [-1, int((~example.loss_mask).sum()), *example.input_ids.tolist()]
    return blake2b(repr(ids).encode(), digest_size=16).digest()
