"""Sorting digits: a task with one right answer that any algorithm learns in minutes on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from math import gcd
from typing import Any

from rlhf_core.components import TaskContext
from rlhf_core.prompts import PromptStream, RecordRules
from rlhf_core.protocols import PromptSource
from rlhf_core.util import derive_seed

from .config import SortDigitsConfig

_NUM_MEASURED = 1000
"""Number of problems whose length is checked if the limit is far off."""
_LINE = '{"answer": "%s", "chosen": "%s", "completion": "%s", "prompt": "%s", "rejected": "%s"}\n'
"""A record as a line of JSON, as it enters the digest of the data."""


class SortDigits:
    """Problem i is the number (a i + b) mod 10^num_digits with a coprime to 10, so all problems differ.

    Example:
        >>> record = SortDigits(num_digits=4, size=10, seed=0)[0]
        >>> record["answer"] == "".join(sorted(record["prompt"].rstrip(">")))
        True
    """

    def __init__(self, *, num_digits: int, size: int, seed: int) -> None:
        self._num_digits = num_digits
        self._size = size
        self._modulus = 10**num_digits
        self._offset = derive_seed(seed, "sort-digits", "offset") % self._modulus
        # Take a from the middle half of the range, so that even a few problems have different leading digits.
        factor = self._modulus // 4 + derive_seed(seed, "sort-digits", "factor") % max(self._modulus // 2, 1)
        while gcd(factor, 10) != 1:
            factor += 1
        self._factor = factor
        self._digest: str | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        digits = str((self._factor * index + self._offset) % self._modulus).zfill(self._num_digits)
        answer = "".join(sorted(digits))
        near_miss = _near_miss(answer, derive_seed(index, "sort-digits", "near miss"))
        return {
            "prompt": f"{digits}>",
            "answer": answer,
            "completion": answer,
            "chosen": answer,
            "rejected": near_miss,
        }

    def scan(self) -> Iterator[Mapping[str, Any]]:
        """Yield every record. Afterwards, `digest` is known."""
        digest = sha256()
        for index in range(self._size):
            record = self[index]
            answer = record["answer"]
            digest.update((_LINE % (answer, answer, answer, record["prompt"], record["rejected"])).encode())
            yield record
        self._digest = digest.hexdigest()

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of all records, as core computes it for a source without this method."""
        if self._digest is None:
            for _ in self.scan():
                pass
        assert self._digest is not None
        return self._digest

    def describe(self, index: int) -> str:
        return f"sort-digits problem {index}"

    def make_stream(self, rules: RecordRules, *, seed: int, held_out: int) -> PromptStream:
        """Return the stream in core's order. All prompts have the same number of characters, so if a sample of them has
        at most half of the allowed tokens, the others are not encoded.
        """
        sample = range(0, self._size, max(1, self._size // _NUM_MEASURED))
        lengths = rules.encoder.lengths([self[index] for index in sample], [self.describe(index) for index in sample])
        if rules.max_prompt_tokens is None or 2 * max(lengths) <= rules.max_prompt_tokens:
            rules = replace(rules, measured=_NUM_MEASURED)
        return PromptStream(self, rules, seed=seed, held_out=held_out)


def _near_miss(answer: str, draw: int) -> str:
    """The answer with one wrong digit, mostly a copy of its neighbor, so that it still looks sorted."""
    position = draw % len(answer)
    neighbor = answer[position - 1]  # the last digit for position 0
    wrong = neighbor if neighbor != answer[position] else str((int(neighbor) + 1) % 10)
    return answer[:position] + wrong + answer[position + 1 :]


def build(config: SortDigitsConfig, context: TaskContext) -> PromptSource:
    """Build the prompt source `sort-digits`."""
    return SortDigits(num_digits=config.num_digits, size=config.size, seed=config.problem_seed)
