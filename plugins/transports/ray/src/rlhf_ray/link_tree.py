"""Links from rank 0 to all makers, as a tree: rank 0 sends once, and makers forward the weights.

Rank 0 sends to the first maker, and each maker to at most two others, so that the time of rank 0 does not depend on the
number of makers, and that of a version grows with the depth of the tree. A maker whose link breaks, and the makers to
which it forwards, receive the rest of the version through the object store. The next version forms the missing links
again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import TimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlhf_strategies import served_store

from .calls import ActorLostError, collect, node_address
from .direct_link import SENDER, WHERE, DirectChunk, Link, LinkError, LinkOffer, copy_to, form_in_background, form_link

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

_FORMING = "to form a direct link"
_MAX_RECEIVERS = 2
"""Maximum number of makers to which a maker forwards."""


@dataclass
class _Place:
    """A maker's place in the tree."""

    sender: str | None
    """Maker that sends to this one. None is rank 0."""
    num_sent: int = 0
    """Tensors sent over the link to this maker."""
    receivers: list[str] = field(default_factory=list)


class LinkTree:
    """Rank 0's view of the links, with its own end of the first one."""

    def __init__(self, device: torch.device, *, timeout_seconds: float) -> None:
        """Start without links.

        Args:
            device: Device of the weights.
            timeout_seconds: Maximum wait for two processes to form a link, and for the transfer of each chunk.
        """
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._places: dict[str, _Place] = {}
        """In the order of joining, so that a sender comes before its receivers."""
        self._link: Link | None = None
        self._unlinkable: set[str] = set()
        """Makers to which a link could not be formed and is not tried again."""
        self._store: Any = None

    @property
    def first(self) -> str | None:
        """Maker to which rank 0 sends. None without links."""
        return next(iter(self._places), None)

    def open(self, makers: Mapping[str, Any]) -> None:
        """Form links to the makers (name -> handle) that lack one, and close those of other makers.

        If a link cannot be formed, the reason is logged and the maker uses the object store.
        """
        for name in self._places.keys() - makers.keys():
            self.drop(name)
        self._unlinkable &= makers.keys()
        for name in makers:
            if name in self._places or name in self._unlinkable:
                continue
            try:
                self._join(name, makers)
            except LinkError as error:
                self._unlinkable.add(name)
                logger.warning("%s receives its weights through the object store: %s", name, error)
            except ActorLostError:
                pass  # the sync itself detects and reports this

    def send(self, shard: Mapping[str, Tensor]) -> dict[str, DirectChunk]:
        """Start to send a shard to the first maker.

        Returns:
            Maker -> the argument with which it must receive the shard, for every maker with a link.

        Raises:
            LinkError: The link to the first maker broke, or a previous chunk was not sent in time.
        """
        if self._link is None:
            return {}
        places = self._places
        chunks = {
            name: DirectChunk.of(
                shard, place.num_sent, tuple((each, places[each].num_sent) for each in place.receivers)
            )
            for name, place in places.items()
        }
        self._link.send(copy_to(shard, self._link.device), next(iter(places.values())).num_sent)
        for place in places.values():
            place.num_sent += len(shard)
        return chunks

    def wait_until_sent(self) -> None:
        """Wait until the first maker has everything. If that fails, the link is formed again for the next version."""
        if self._link is None or (first := self.first) is None:
            return
        try:
            self._link.wait_until_sent()
        except LinkError as error:  # the maker has the version anyway
            logger.warning("the link to %s will be formed again for the next version: %s", first, error)
            self.drop(first)

    def drop(self, maker: str) -> None:
        """Forget the maker's link, if any, and those of its receivers. The next `open` forms them again."""
        if (place := self._places.pop(maker, None)) is None:
            return
        if place.sender is None:
            assert self._link is not None
            self._link.close()
            self._link = None
        elif place.sender in self._places:
            self._places[place.sender].receivers.remove(maker)
        for receiver in place.receivers:
            self.drop(receiver)

    def _join(self, name: str, makers: Mapping[str, Any]) -> None:
        """Form the link to one maker, from the first sender that has room."""
        address, timeout = node_address(), self._timeout_seconds
        if self._store is None:
            self._store = served_store(address, timeout=timedelta(seconds=timeout))
        offer = LinkOffer(address, self._store.port, secrets.token_hex(16), self._device.type, timeout)
        sender = next((each for each, place in self._places.items() if len(place.receivers) < _MAX_RECEIVERS), None)
        if sender is None:
            self._link = self._form(name, makers[name], offer, address)
        else:
            self._form_between(sender, name, makers, offer)
            self._places[sender].receivers.append(name)
        self._places[name] = _Place(sender)

    def _form_between(self, sender: str, receiver: str, makers: Mapping[str, Any], offer: LinkOffer) -> None:
        """Form a link between two makers. The sender answers at once, and the receiver when the link is formed."""
        self._ask_sender(sender, makers[sender].join_link_as_sender.remote(receiver, offer))
        try:
            self._collect_receiver(receiver, makers[receiver], offer)
        except LinkError:
            self._ask_sender(sender, makers[sender].get_policy_version.remote())  # it may have died meanwhile
            raise

    def _ask_sender(self, name: str, call: Any) -> None:
        """Wait for a sender's answer. If the sender was lost, its receivers are linked again by the next `open`."""
        try:
            collect([(name, call)], timeout_seconds=self._timeout_seconds, doing=_FORMING)
        except ActorLostError:
            self.drop(name)
            raise

    def _form(self, name: str, maker: Any, offer: LinkOffer, address: str) -> Link:
        """Form the link from this process to the first maker."""
        trainer_end = form_in_background(lambda: form_link(self._store, SENDER, offer, address))
        self._collect_receiver(name, maker, offer)
        try:
            return trainer_end.result(offer.timeout_seconds)
        except TimeoutError:
            raise LinkError(f"waited {offer.timeout_seconds:g} s for the trainer's end", where=WHERE) from None

    def _collect_receiver(self, name: str, maker: Any, offer: LinkOffer) -> None:
        calls = [(name, maker.join_link.remote(offer))]
        collect(calls, timeout_seconds=2 * offer.timeout_seconds, doing=_FORMING)
