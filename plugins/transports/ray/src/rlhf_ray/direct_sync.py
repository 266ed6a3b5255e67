"""`transport.sync: direct`: chunks go over a link to each maker, and through the object store where there is none.

The object store gets a copy of each version too: it is what a maker that starts later is given, and what is sent again
to one whose link breaks. So a link that fails costs time, never a version.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .calls import ActorLostError, Call, NamedActors, collect, node_address
from .direct_link import SENDER, WHERE, Link, LinkError, LinkOffer, PackedShard, form_link, listening_store
from .sending import Sending

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
