"""Transfer of one version of the weights to the makers.

All makers are called concurrently with few pending calls each, and makers that died are skipped. With
`transport.sync: direct`, chunks go over a link to each maker, and through the object store to makers without a link.
The store receives a copy of each version in this mode too, for makers that start later and for those whose link breaks.
So a failing link costs time, but never a version.
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
from .direct_link import SENDER, WHERE, Link, LinkError, LinkOffer, copy_to, form_link
from .wire import num_bytes, pack

if TYPE_CHECKING:
    import torch
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
    links: Links | None = None
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
        calls: list[Call | None] = []
        copies: dict[str, Tensor] = {}
        for name in list(self.names):
            link = None if self.links is None else self.links.get(name)
            if link is None:
                self.fallbacks.add(name)
                calls.append(self._start(name, stored))
                continue
            copies = copies or copy_to(shard, link.device)
            try:
                calls.append(self._start(name, {keyword: link.send(copies), **options}))
            except LinkError as error:
                self._fall_back(name, error)
        self._add_pending(calls)
        return num_bytes(arrays)

    def wait_for_all(self) -> None:
        """Wait until every call has been answered. Raises the error of a remaining maker."""
        self._wait(0)
        if (links := self.links) is None:
            return
        for name in self.names:
            if (link := links.get(name)) is not None:
                try:
                    link.wait_until_sent()
                except LinkError as error:  # the maker has the version anyway
                    logger.warning("the link to %s will be formed again for the next version: %s", name, error)
                    links.drop(name)

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


class Links:
    """The trainer's ends of its links to makers."""

    def __init__(self, device: torch.device, *, timeout_seconds: float) -> None:
        """Start without links.

        Args:
            device: Device of the weights.
            timeout_seconds: Maximum wait for a maker to form its end, and for the transfer of each chunk.
        """
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._links: dict[str, Link] = {}
        self._unlinkable: set[str] = set()
        """Makers to which a link could not be formed and is not tried again."""
        self._store: Any = None

    def get(self, maker: str) -> Link | None:
        """The link to a maker, if any."""
        return self._links.get(maker)

    def open(self, makers: Mapping[str, Any]) -> None:
        """Form links to the makers (name -> handle) that lack one, and close those of other makers.

        If a link cannot be formed, the reason is logged and the maker uses the object store.
        """
        for name in self._links.keys() - makers.keys():
            self.drop(name)
        self._unlinkable &= makers.keys()
        for name, maker in makers.items():
            if name in self._links or name in self._unlinkable:
                continue
            try:
                self._links[name] = self._form(name, maker)
            except LinkError as error:
                self._unlinkable.add(name)
                logger.warning("%s receives its weights through the object store: %s", name, error)
            except ActorLostError:
                pass  # the sync itself detects and reports this

    def drop(self, maker: str) -> None:
        """Close the link, if any. The next `open` forms it again."""
        if (link := self._links.pop(maker, None)) is not None:
            link.close()

    def _form(self, name: str, maker: Any) -> Link:
        address, timeout = node_address(), self._timeout_seconds
        if self._store is None:
            self._store = served_store(address, timeout=timedelta(seconds=timeout))
        offer = LinkOffer(address, self._store.port, secrets.token_hex(16), self._device.type, timeout)
        # Both ends wait for each other. This end waits on a thread, since torch's wait cannot be canceled, but an error
        # of the maker must end it.
        trainer_end: Future[Link] = Future()

        def form() -> None:
            try:
                trainer_end.set_result(form_link(self._store, SENDER, offer, address))
            except LinkError as error:
                trainer_end.set_exception(error)

        threading.Thread(target=form, name="link", daemon=True).start()
        collect([(name, maker.join_link.remote(offer))], timeout_seconds=2 * timeout, doing="to form a direct link")
        try:
            return trainer_end.result(timeout)
        except TimeoutError:
            raise LinkError(f"waited {timeout:g} s for the trainer's end", where=WHERE) from None
