"""Transfer of one version of the weights to the makers.

All makers are called concurrently with few pending calls each, and makers that died are skipped. With
`transport.sync: direct`, chunks go over links (`link_tree.py`), and through the object store to makers without a link.
The store receives a copy of each version in this mode too, for makers that start later and for those whose link breaks.
So a failing link costs time, but never a version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from .calls import ActorLostError, Call, NamedActors, collect
from .direct_link import DirectChunk, LinkError
from .link_tree import LinkTree
from .wire import num_bytes, pack

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_MAX_PENDING_CALLS = 3
"""Chunks that makers may still be reading while the next is gathered. Bounds the object store's memory."""


@dataclass
class Broadcast:
    """Sends the parts of one version. Each is written to the object store once for all makers."""

    makers: NamedActors
    names: list[str]
    """Remaining makers."""
    _: KW_ONLY
    version: int
    timeout_seconds: float
    """Maximum wait for the makers to take one part."""
    log: list[dict[str, Any]] | None = None
    """Receives all calls, to repeat for a maker that starts later or whose link breaks. None records nothing."""
    links: LinkTree | None = None
    """Links, over which chunks go to makers that have one."""
    fallbacks: set[str] = field(default_factory=set)
    """Makers that received a part of this version through the object store."""
    _pending: list[list[Call]] = field(default_factory=list)

    def call(self, options: dict[str, Any]) -> None:
        """Call all remaining makers, then wait until few calls are pending. A maker handles its calls in order."""
        self._record(options)
        self._add_pending([self._start(name, options) for name in list(self.names)])

    def chunk(self, keyword: str, shard: Mapping[str, Tensor], options: dict[str, Any]) -> int:
        """Send a shard as the argument `keyword` of a call, and return its size in bytes."""
        arrays = pack(shard)
        stored = {keyword: ray.put(arrays), **options}
        self._record(stored)
        chunks, failed = self._send_to_links(shard)
        calls: list[Call | None] = []
        for name in [each for each in self.names if each != failed]:
            if name not in chunks:
                self.fallbacks.add(name)
            calls.append(self._start(name, {keyword: chunks[name], **options} if name in chunks else stored))
        self._add_pending(calls)
        return num_bytes(arrays)

    def wait_for_all(self) -> None:
        """Wait until every call has been answered. Raises the error of a remaining maker."""
        self._wait(0)
        if self.links is not None:
            self.links.wait_until_sent()

    def _send_to_links(self, shard: Mapping[str, Tensor]) -> tuple[dict[str, DirectChunk], str | None]:
        """Send a shard into the links.

        Returns:
            Maker -> argument with which it receives the shard, for those with a link, and the first maker if the link
            to it failed, which receives the whole version again.
        """
        if self.links is None or (first := self.links.first) is None:
            return {}, None
        try:
            return self.links.send(shard), None
        except LinkError as error:
            self._fall_back(first, error)
            return {}, first

    def _record(self, options: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.append(options)

    def _start(self, name: str, options: Mapping[str, Any]) -> Call | None:
        """Call one maker. Returns None if it was lost."""
        try:
            maker = self.makers.handle(name)
        except ActorLostError as error:
            self._leave_out(name, error)
            return None
        return name, maker.update_experience_maker.remote(**options)

    def _add_pending(self, calls: Iterable[Call | None]) -> None:
        self._pending.append([call for call in calls if call is not None])
        self._wait(_MAX_PENDING_CALLS)

    def _wait(self, num_left: int) -> None:
        """Wait until at most `num_left` calls of each maker are pending. Raises a maker's error or `DeadlineError`."""
        doing = f"to take policy version {self.version}"
        while len(self._pending) > num_left:
            for call in self._pending.pop(0):
                try:
                    collect([call], timeout_seconds=self.timeout_seconds, doing=doing)
                except LinkError as error:
                    self._fall_back(call[0], error)
                except ActorLostError as error:
                    self._leave_out(call[0], error)

    def _leave_out(self, name: str, error: ActorLostError) -> None:
        """Continue without a maker that died. Raises `error` if none is left and none will start later."""
        self.fallbacks.discard(name)  # its link broke because it died
        if self.links is not None:
            self.links.drop(name)
        if name not in self.names:
            return  # another of its calls has reported this
        logger.error("skipped in this weight sync: %s", error)
        self.makers.mark_lost(name)
        self.names.remove(name)
        if not self.names and self.log is None:
            raise error

    def _fall_back(self, name: str, error: LinkError) -> None:
        """Send all parts again through the object store. The maker drops those that it has received."""
        assert self.links is not None and self.log is not None
        logger.warning("%s receives version %d through the object store: %s", name, self.version, error)
        self.links.drop(name)
        self.fallbacks.add(name)
        for calls in self._pending:
            calls[:] = [call for call in calls if call[0] != name]
        self._pending += [[call] for options in self.log if (call := self._start(name, options))]
