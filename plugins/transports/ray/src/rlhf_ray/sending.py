"""One version of the weights on its way to the makers: calls to all at once, few at a time, without those that died.

With `transport.sync: direct`, chunks go over a link to each maker, and through the object store where there is none.
The store gets a copy of each version then, too: it is what a maker that starts later is given, and what is sent again
to one whose link breaks. So a link that fails costs time, never a version.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from .calls import ActorLostError, Call, NamedActors, collect, node_address
from .direct_link import SENDER, WHERE, Link, LinkError, LinkOffer, PackedShard, form_link, listening_store
from .wire import num_bytes, pack

if TYPE_CHECKING:
    import torch
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


logger = logging.getLogger(__name__)


class Links:
    """The trainer's ends of its links, by maker."""

    def __init__(self, device: torch.device, *, timeout_seconds: float) -> None:
        """timeout_seconds: longest wait for a maker to form its end, and for each chunk to cross."""
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._links: dict[str, Link] = {}
        self._unlinked: set[str] = set()
        """Makers to which no link could be formed: these are not tried again."""
        self._store: Any = None

    def get(self, maker: str) -> Link | None:
        return self._links.get(maker)

    def open(self, makers: Mapping[str, Any]) -> None:
        """Form links to those of the makers (name -> handle) that have none; forget those of others.

        One that cannot be formed is logged with its reason, and that maker is served by the object store.
        """
        for gone in self._links.keys() - makers.keys():
            self.drop(gone)
        self._unlinked &= makers.keys()
        for name, maker in makers.items():
            if name in self._links or name in self._unlinked:
                continue
            try:
                self._links[name] = self._formed(name, maker)
            except LinkError as error:
                self._unlinked.add(name)
                logger.warning("%s gets its weights through the object store: %s", name, error)
            except ActorLostError:
                pass  # the sync itself finds that out, and says so

    def drop(self, maker: str) -> None:
        """Close the link, if there is one; the next `open` forms it anew."""
        if (link := self._links.pop(maker, None)) is not None:
            link.close()

    def _formed(self, name: str, maker: Any) -> Link:
        address, timeout = node_address(), self._timeout_seconds
        if self._store is None:
            self._store = listening_store(address, timeout)
        offer = LinkOffer(address, self._store.port, secrets.token_hex(16), self._device.type, timeout)
        # Both ends wait for each other; the maker's answer says when it is no use to wait any longer.
        own = _Forming(self._store, offer, address)
        collect([(name, maker.join_link.remote(offer))], timeout_seconds=2 * timeout, doing="to form a direct link")
        return own.result(timeout)


class _Forming:
    """Forms the trainer's end in a thread, since torch's own wait for a peer cannot be called off."""

    def __init__(self, store: Any, offer: LinkOffer, address: str) -> None:
        self._link: Link | None = None
        self._error: LinkError | None = None
        self._thread = threading.Thread(target=self._run, args=(store, offer, address), name="link", daemon=True)
        self._thread.start()

    def _run(self, store: Any, offer: LinkOffer, address: str) -> None:
        try:
            self._link = form_link(store, SENDER, offer, address)
        except LinkError as error:
            self._error = error

    def result(self, timeout_seconds: float) -> Link:
        self._thread.join(timeout_seconds)
        if self._link is None:
            raise self._error or LinkError(f"waited {timeout_seconds:g} s for this end of it", where=WHERE)
        return self._link


class DirectSending(Sending):
    """Sends chunks over the links; makers without one, and all other calls, are served as by `Sending`."""

    def __init__(
        self,
        makers: NamedActors,
        names: list[str],
        *,
        version: int,
        timeout_seconds: float,
        kept: list[dict[str, Any]],
        links: Links,
    ) -> None:
        super().__init__(makers, names, version=version, timeout_seconds=timeout_seconds, kept=kept)
        self.fallbacks: set[str] = set()
        """Makers that got a part of this version through the object store."""
        self._calls = kept
        self._links = links

    def chunk(self, keyword: str, shard: Mapping[str, Tensor], options: dict[str, Any]) -> int:
        reference, size = self.put(shard)
        stored = {keyword: reference, **options}
        self.keep(stored)
        calls: list[Call] = []
        packed: PackedShard | None = None
        for name in list(self.names):
            if (link := self._links.get(name)) is None:
                self.fallbacks.add(name)
                call = self.start(name, stored)
            else:
                packed = packed or PackedShard.of(shard, link.device)
                try:
                    call = self.start(name, {keyword: link.send(packed), **options})
                except LinkError as error:
                    self._fall_back(name, error)
                    continue
            if call is not None:
                calls.append(call)
        self.under_way.append(calls)
        self.wait_for_room()
        return size

    def wait_for_all(self) -> None:
        super().wait_for_all()
        for name in self.names:
            if (link := self._links.get(name)) is not None:
                try:
                    link.settle()
                except LinkError as error:  # the maker has the version all the same
                    logger.warning("the link to %s is formed anew for the next version: %s", name, error)
                    self._links.drop(name)

    def answered(self, call: Call) -> None:
        try:
            super().answered(call)
        except LinkError as error:
            self._fall_back(call[0], error)

    def leave_out(self, name: str, error: ActorLostError) -> None:
        super().leave_out(name, error)
        self._links.drop(name)
        self.fallbacks.discard(name)  # its link broke because it died

    def _fall_back(self, name: str, error: LinkError) -> None:
        """Send everything so far again, through the object store: the maker drops what it has of the version."""
        logger.warning("%s gets version %d through the object store: %s", name, self.version, error)
        self._links.drop(name)
        self.fallbacks.add(name)
        for calls in self.under_way:
            calls[:] = [call for call in calls if call[0] != name]
        self.under_way += [[call] for options in self._calls if (call := self.start(name, options))]
