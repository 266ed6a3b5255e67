"""Keys and values kept from earlier turns: an episode's next turn begins with the tokens of the previous one."""

from __future__ import annotations

from collections import OrderedDict
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

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the store."""
        return sum(map(len, self._prefixes))

    def clear(self) -> None:
        """Drop all prefixes."""
        self._prefixes.clear()

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a prefix of `num_tokens` fits in the store."""
        return num_tokens <= self._max_tokens

    def put(self, token_ids: tuple[int, ...], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add the keys and values of these tokens. The store owns the tensors from now on."""
        self._prefixes.setdefault(token_ids, Prefix(len(token_ids), layers))
        while self.num_tokens > self._max_tokens:
            self._prefixes.popitem(last=False)

    def longest(self, token_ids: tuple[int, ...]) -> Prefix | None:
        """Find the longest stored prefix of a prompt that leaves at least one of its tokens to compute."""
        for length in sorted({len(each) for each in self._prefixes if len(each) < len(token_ids)}, reverse=True):
            if (prefix := self._prefixes.get(token_ids[:length])) is not None:
                self._prefixes.move_to_end(token_ids[:length])
                return prefix
        return None
