"""One version of the weights on its way to the makers: calls to all at once, few at a time, without those that died.

With `transport.sync: direct`, chunks go over a link to each maker, and through the object store where there is none.
The store gets a copy of each version then, too: it is what a maker that starts later is given, and what is sent again
to one whose link breaks. So a link that fails costs time, never a version.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

from rlhf_strategies import served_store

from .calls import ActorLostError, Call, NamedActors, collect, node_address
from .direct_link import SENDER, WHERE, Link, LinkError, LinkOffer, copied, form_link
from .wire import num_bytes, pack

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

_CALLS_UNDER_WAY = 3
"""Chunks that makers may still be reading while the next is gathered; bounds the object store's memory."""


@dataclass
class Sending:
    """Sends the parts of one version, each written to the object store once for all makers."""

    makers: NamedActors
    names: list[str]
    """Makers that are left."""
    _: KW_ONLY
    version: int
    timeout_seconds: float
    """Longest wait for the makers to take one part."""
    kept: list[dict[str, Any]] | None = None
    """All calls, to repeat for a maker that starts later, or whose link breaks; None keeps none."""
    links: Links | None = None
    """Over which chunks go to the makers that have one."""
    fallbacks: set[str] = field(default_factory=set)
    """Makers that got a part of this version through the object store."""
    _under_way: list[list[Call]] = field(default_factory=list)

    def call(self, options: dict[str, Any]) -> None:
        """Call all makers that are left, then wait until few calls are pending. A maker takes its calls in order."""
        self._keep(options)
        self._began([self._start(name, options) for name in list(self.names)])

    def chunk(self, keyword: str, shard: Mapping[str, Tensor], options: dict[str, Any]) -> int:
        """Send a shard as the argument `keyword` of a call; returns its size in bytes."""
        arrays = pack(shard)
        stored = {keyword: ray.put(arrays), **options}
        self._keep(stored)
        calls: list[Call | None] = []
        copies: dict[str, Tensor] = {}
        for name in list(self.names):
            link = None if self.links is None else self.links.get(name)
            if link is None:
                self.fallbacks.add(name)
                calls.append(self._start(name, stored))
                continue
            copies = copies or copied(shard, link.device)
            try:
                calls.append(self._start(name, {keyword: link.send(copies), **options}))
            except LinkError as error:
                self._fall_back(name, error)
        self._began(calls)
        return num_bytes(arrays)

    def wait_for_all(self) -> None:
        """Wait until every call has been answered. Raises what a maker that is left answered."""
        self._wait(0)
        if (links := self.links) is None:
            return
        for name in self.names:
            if (link := links.get(name)) is not None:
                try:
                    link.settle()
                except LinkError as error:  # the maker has the version all the same
                    logger.warning("the link to %s is formed anew for the next version: %s", name, error)
                    links.drop(name)

    def _keep(self, options: dict[str, Any]) -> None:
        if self.kept is not None:
            self.kept.append(options)

    def _start(self, name: str, options: Mapping[str, Any]) -> Call | None:
        """Call one maker; None where it is gone."""
        try:
            maker = self.makers.handle(name)
        except ActorLostError as error:
            self._leave_out(name, error)
            return None
        return name, maker.update_experience_maker.remote(**options)

    def _began(self, calls: Iterable[Call | None]) -> None:
        self._under_way.append([call for call in calls if call is not None])
        self._wait(_CALLS_UNDER_WAY)

    def _wait(self, num_left: int) -> None:
        """Wait until so few calls of each maker are left. Raises a maker's error, or `DeadlineError`."""
        doing = f"to take policy version {self.version}"
        while len(self._under_way) > num_left:
            for call in self._under_way.pop(0):
                try:
                    collect([call], timeout_seconds=self.timeout_seconds, doing=doing)
                except LinkError as error:
                    self._fall_back(call[0], error)
                except ActorLostError as error:
                    self._leave_out(call[0], error)

    def _leave_out(self, name: str, error: ActorLostError) -> None:
        """Go on without a maker that died. Raises `error` where nobody is left and none will start later."""
        self.fallbacks.discard(name)  # its link broke because it died
        if self.links is not None:
            self.links.drop(name)
        if name not in self.names:
            return  # another of its calls has said so
        logger.error("%s; it is left out of this weight sync", error)
        self.makers.lose(name)
        self.names.remove(name)
        if not self.names and self.kept is None:
            raise error

    def _fall_back(self, name: str, error: LinkError) -> None:
        """Send everything so far again, through the object store: the maker drops what it has of the version."""
        assert self.links is not None and self.kept is not None
        logger.warning("%s gets version %d through the object store: %s", name, self.version, error)
        self.links.drop(name)
        self.fallbacks.add(name)
        for calls in self._under_way:
            calls[:] = [call for call in calls if call[0] != name]
        self._under_way += [[call] for options in self.kept if (call := self._start(name, options))]


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
            self._store = served_store(address, timeout=timedelta(seconds=timeout))
        offer = LinkOffer(address, self._store.port, secrets.token_hex(16), self._device.type, timeout)
        # Both ends wait for each other, on a thread since torch's own wait for a peer cannot be called off; the maker's
        # answer says when it is no use to wait any longer.
        own: Future[Link] = Future()

        def form() -> None:
            try:
                own.set_result(form_link(self._store, SENDER, offer, address))
            except LinkError as error:
                own.set_exception(error)

        threading.Thread(target=form, name="link", daemon=True).start()
        collect([(name, maker.join_link.remote(offer))], timeout_seconds=2 * timeout, doing="to form a direct link")
        try:
            return own.result(timeout)
        except TimeoutError:
            raise LinkError(f"waited {timeout:g} s for this end of it", where=WHERE) from None
