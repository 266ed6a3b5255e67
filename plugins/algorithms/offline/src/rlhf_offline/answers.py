"""The answers of a line (one, or a chosen and a rejected one), and the reference model's values of them."""

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
    """One answer, or the chosen and the rejected one."""
    good: tuple[bool, ...] = (True, False)
    margin: float = 0.0
    """Amount by which the chosen answer's score should exceed the rejected one's."""
    counts: bool = True
    """False for a filler that must not contribute to the loss."""
    reference: Tensor | None = None
    """[2] float32: the reference model's value of each answer, 0 for a missing second answer."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in its rows, padded to the longest."""
        return len(self.answers) * max(example.num_tokens for example in self.answers)

    def masked(self) -> Answers:
        """Return a copy with `counts` False."""
        return replace(self, counts=False)


@dataclass(frozen=True, slots=True)
class AnswersBatch:
    """N lines as R padded rows: the first answer of each line, then the second answers of lines with two."""

    examples: ExampleBatch
    line: Tensor
    """[R] int64, index of the line a row belongs to."""
    good: Tensor
    """[R] bool."""
    counts: Tensor
    """[N] bool, True if the line contributes to the loss."""
    margins: Tensor
    """[N] float32."""
    reference: Tensor | None
    """[R] float32."""

    def __len__(self) -> int:
        return int(self.counts.numel())

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split [R] values into those of the chosen and of the rejected answers of lines with two, [P] each."""
        num_lines = len(self)
        return values[self.line[num_lines:]], values[num_lines:]

    def by_line(self, values: Tensor) -> Tensor:
        """Rearrange [R] values to [N, 2], with 0 for lines with one row."""
        num_lines = len(self)
        second = values.new_zeros(num_lines).index_put((self.line[num_lines:],), values[num_lines:])
        return torch.stack([values[:num_lines], second], dim=-1)


def collate_answers(lines: Sequence[Answers], *, pad_id: int = 0) -> AnswersBatch:
    """Collate lines into rows padded to the longest. Either all lines have reference values or none."""
    rows = [(index, side) for side in (0, 1) for index, line in enumerate(lines) if side < len(line.answers)]
    known = [line.reference for line in lines if line.reference is not None]
    return AnswersBatch(
        collate_examples([lines[index].answers[side] for index, side in rows], pad_id=pad_id),
        line=torch.tensor([index for index, _ in rows]),
        good=torch.tensor([lines[index].good[side] for index, side in rows]),
        counts=torch.tensor([line.counts for line in lines]),
        margins=torch.tensor([line.margin for line in lines], dtype=torch.float32),
        reference=torch.stack([known[index][side] for index, side in rows]) if len(known) == len(lines) else None,
    )


def mismatched(lines: Sequence[Answers]) -> list[Answers]:
    """Combine each line's prompt with an answer to the next line, alternating between its first and second answer."""
    shifted = [*lines[1:], lines[0]]
    wrong = [line.answers[index % len(line.answers)] for index, line in enumerate(shifted)]
    return [Answers((_with_answer(line.answers[0], other),), (True,)) for line, other in zip(lines, wrong, strict=True)]


def _with_answer(prompt: Example, answer: Example) -> Example:
    before, after = prompt.input_ids[~prompt.loss_mask], answer.input_ids[answer.loss_mask]
    is_answer = torch.arange(len(before) + len(after)) >= len(before)
    return Example(torch.cat([before, after]), is_answer, columns=prompt.columns)


class KnownReference:
    """Cache of the reference model's values of answers, so that each line is computed only once per run."""

    def __init__(self) -> None:
        self._known: dict[bytes, Tensor] = {}

    def fill(self, lines: Sequence[Answers], compute: Callable[[Sequence[Answers]], Sequence[Tensor]]) -> list[Answers]:
        """Return the lines with `reference` set. `compute` is called with the lines that are not cached yet."""
        keys = [_digest(line) for line in lines]
        unknown = {key: line for key, line in zip(keys, lines, strict=True) if key not in self._known}
        self._known.update(zip(unknown, compute(list(unknown.values())), strict=True))
        return [replace(line, reference=self._known[key]) for key, line in zip(keys, lines, strict=True)]


def _digest(line: Answers) -> bytes:
    ids: list[int] = []
    digest = blake2b(digest_size=16)
    for example in line.answers:
        ids += [-1, int((~example.loss_mask).sum()), *example.input_ids.tolist()]
        for name, values in example.columns.model_inputs.items():
            digest.update(f"{name} {list(values.shape)}".encode() + values.contiguous().numpy().tobytes())
    digest.update(repr(ids).encode())
    return digest.digest()
