"""Keys and values that earlier turns left: the next turn of an episode begins with the tokens of the one before."""

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
    """At most `max_tokens` tokens of prefixes; those that were used longest ago go first.

    It is emptied when weights change: a prefix is known by its tokens and by the weights in use.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Held now."""
        return sum(map(len, self._held))

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()

    def may_hold(self, num_tokens: int) -> bool:
        """Whether a prefix so long is kept at all."""
        return num_tokens <= self._max_tokens

    def put(self, token_ids: tuple[int, ...], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Keep what belongs to these tokens; the tensors are its own from now on."""
        self._held.setdefault(token_ids, Prefix(len(token_ids), layers))
        while self.num_tokens > self._max_tokens:
            self._held.popitem(last=False)

    def longest(self, token_ids: tuple[int, ...]) -> Prefix | None:
        """The longest one that a prompt begins with, and that leaves a token of it to feed."""
        for length in sorted({len(each) for each in self._held if len(each) < len(token_ids)}, reverse=True):
            if (found := self._held.get(token_ids[:length])) is not None:
                self._held.move_to_end(token_ids[:length])
                return found
        return None
