"""One version of the weights on its way to the makers: calls to all at once, few at a time, without those that died."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from .calls import ActorLostError, Call, NamedActors, collect
from .wire import num_bytes, pack

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_CALLS_UNDER_WAY = 3
"""Chunks that makers may still be reading while the next is gathered; bounds the object store's memory."""


class Sending:
    """Sends the parts of one version through the object store, each written once for all makers."""

    def __init__(
        self,
        makers: NamedActors,
        names: list[str],
        *,
        version: int,
        timeout_seconds: float,
        kept: list[dict[str, Any]] | None = None,
    ) -> None:
        """kept: receives all calls, to repeat for a maker that starts later. timeout_seconds: longest wait for the
        makers to take one part.
        """
        self.makers = makers
        self.names = names
        """Makers that are left."""
        self.version = version
        self.timeout_seconds = timeout_seconds
        self.kept = kept
        self.under_way: list[list[Call]] = []

    def call(self, options: dict[str, Any]) -> None:
        """Call all makers that are left, then wait until few calls are pending. A maker takes its calls in order."""
        self.keep(options)
        self.under_way.append([call for name in list(self.names) if (call := self.start(name, options))])
        self.wait_for_room()

    def chunk(self, keyword: str, shard: Mapping[str, Tensor], options: dict[str, Any]) -> int:
        """Send a shard as the argument `keyword` of a call; returns its size in bytes."""
        stored, size = self.put(shard)
        self.call({keyword: stored, **options})
        return size

    def put(self, shard: Mapping[str, Tensor]) -> tuple[ray.ObjectRef[Any], int]:
        """Write a shard to the object store; returns where it is and its size in bytes."""
        packed = pack(shard)
        return ray.put(packed), num_bytes(packed)

    def keep(self, options: dict[str, Any]) -> None:
        if self.kept is not None:
            self.kept.append(options)

    def start(self, name: str, options: Mapping[str, Any]) -> Call | None:
        """Call one maker; None where it is gone."""
        try:
            maker = self.makers.handle(name)
        except ActorLostError as error:
            self.leave_out(name, error)
            return None
        return name, maker.update_experience_maker.remote(**options)

    def wait_for_room(self) -> None:
        while len(self.under_way) > _CALLS_UNDER_WAY:
            self._wait(self.under_way.pop(0))

    def wait_for_all(self) -> None:
        """Wait until every call has been answered. Raises what a maker that is left answered."""
        while self.under_way:
            self._wait(self.under_way.pop(0))

    def answered(self, call: Call) -> None:
        """Collect one answer. Raises the maker's error, also `ActorLostError`, or `DeadlineError`."""
        doing = f"to take policy version {self.version}"
        collect([call], timeout_seconds=self.timeout_seconds, doing=doing)

    def leave_out(self, name: str, error: ActorLostError) -> None:
        """Go on without a maker that died. Raises `error` where nobody is left and none will start later."""
        if name not in self.names:
            return  # another of its calls has said so
        logger.error("%s; it is left out of this weight sync", error)
        self.makers.lose(name)
        self.names.remove(name)
        if not self.names and self.kept is None:
            raise error

    def _wait(self, calls: list[Call]) -> None:
        for call in calls:
            try:
                self.answered(call)
            except ActorLostError as error:
                self.leave_out(call[0], error)
