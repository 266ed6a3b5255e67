"""Keeps what the reference says of an item: it is asked once, whatever the number of epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from .examples import Example


class Referred(Protocol):
    """An item of some answers, with a place for what the reference says of them."""

    @property
    def answers(self) -> Sequence[Example]: ...

    @property
    def reference(self) -> Tensor | None: ...


ItemT = TypeVar("ItemT", bound=Referred)


class KnownReference:
    """The reference's log-probs, by the digest of an item's answers."""

    def __init__(self) -> None:
        self._known: dict[bytes, Tensor] = {}

    def fill(self, items: Sequence[ItemT], ask: Callable[[Sequence[ItemT]], Sequence[Tensor]]) -> list[ItemT]:
        """The same items with `reference`, of which `ask` is given those that are not known yet."""
        keys = [_digest(item) for item in items]
        unknown = {key: item for key, item in zip(keys, items, strict=True) if key not in self._known}
        self._known.update(zip(unknown, ask(list(unknown.values())), strict=True))
        return [
            cast(ItemT, replace(cast(Any, item), reference=self._known[key]))
            for key, item in zip(keys, items, strict=True)
        ]


def _digest(item: Referred) -> bytes:
    ids: list[int] = []
    for example in item.answers:
        ids += [-1, int((~example.loss_mask).sum()), *example.input_ids.tolist()]
    return blake2b(repr(ids).encode(), digest_size=16).digest()
