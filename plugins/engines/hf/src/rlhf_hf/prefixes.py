"""Keys and values kept from earlier turns: an episode's next turn begins with the tokens of the previous one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of a sequence of tokens, under one version of the weights."""

    num_tokens: int
    layers: Sequence[tuple[Tensor, Tensor]]
    """[heads, tokens, dim] each."""


class PrefixStore:
    """At most `max_tokens` tokens of prefixes. The least recently used ones are dropped first.

    Clear it when weights change: prefixes are looked up by their tokens only.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._number_of: Counter[int] = Counter()
        """Length -> number of prefixes of this length."""
        self.num_tokens = 0
        """Number of tokens in the store."""

    def clear(self) -> None:
        """Drop all prefixes."""
        self._prefixes.clear()
        self._number_of.clear()
        self.num_tokens = 0

    def lacks(self, token_ids: tuple[int, ...]) -> bool:
        """Whether these tokens fit in the store and are not in it."""
        return len(token_ids) <= self._max_tokens and token_ids not in self._prefixes

    def put(self, token_ids: tuple[int, ...], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add the keys and values of these tokens if it lacks them. The store owns the tensors from now on."""
        if not self.lacks(token_ids):
            return
        self._prefixes[token_ids] = Prefix(len(token_ids), layers)
        self._number_of[len(token_ids)] += 1
        self.num_tokens += len(token_ids)
        while self.num_tokens > self._max_tokens:
            dropped, _ = self._prefixes.popitem(last=False)
            self._number_of[len(dropped)] -= 1
            self.num_tokens -= len(dropped)

    def longest(self, token_ids: tuple[int, ...]) -> Prefix | None:
        """Find the longest stored prefix of a prompt that leaves at least one of its tokens to compute."""
        lengths = (length for length, number in self._number_of.items() if number and length < len(token_ids))
        for length in sorted(lengths, reverse=True):
            if (prefix := self._prefixes.get(token_ids[:length])) is not None:
                self._prefixes.move_to_end(token_ids[:length])
                return prefix
        return None
