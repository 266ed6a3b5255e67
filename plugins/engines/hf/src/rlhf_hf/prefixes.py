"""Keys and values that earlier turns left: the next turn of an episode begins with the tokens of the one before."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [heads, tokens, dim] each."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of a sequence of tokens, under one version of the weights."""

    num_tokens: int
    layers: Layers


class PrefixStore:
    """At most `max_tokens` tokens of prefixes; those that were used longest ago go first.

    It is emptied when weights change: a prefix is known by its tokens and by the weights in use.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self.num_tokens = 0
        """Held now."""

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()
        self._lengths.clear()
        self.num_tokens = 0

    def may_hold(self, num_tokens: int) -> bool:
        """Whether a prefix so long is kept at all."""
        return num_tokens <= self._max_tokens

    def put(self, token_ids: tuple[int, ...], layers: Layers) -> None:
        """Keep what belongs to these tokens; the tensors are its own from now on."""
        if token_ids in self._held:
            return
        self._held[token_ids] = Prefix(len(token_ids), layers)
        self._lengths[len(token_ids)] += 1
        self.num_tokens += len(token_ids)
        while self.num_tokens > self._max_tokens:
            self._drop(next(iter(self._held)))

    def longest(self, token_ids: tuple[int, ...]) -> Prefix | None:
        """The longest one that a prompt begins with, and that leaves a token of it to feed."""
        for length in sorted((each for each in self._lengths if each < len(token_ids)), reverse=True):
            if (found := self._held.get(token_ids[:length])) is not None:
                self._held.move_to_end(token_ids[:length])
                return found
        return None

    def _drop(self, token_ids: tuple[int, ...]) -> None:
        length = self._held.pop(token_ids).num_tokens
        self.num_tokens -= length
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
