"""A direct link: a process group of two processes that transfers the bytes of weights.

A link leads from the trainer to a maker, or from a maker to another one, to which it forwards the weights
(`link_tree.py`). Groups are pairs instead of one group of all, so that a maker that dies breaks only its own links, and
one that starts later does not affect the others. torch's default group, which a trainer may need for its strategy, is
not used. Ray's direct transport is not used either: its gloo and NCCL groups are created and called without deadlines,
an actor may be in only one group, and a failed transfer cannot be aborted.

Received data is never unpickled: a link carries bytes, whose dtype and shape come with Ray's authenticated call. The
group's store and gloo's sockets listen on the address that Ray uses for the node. Keys in the store have a random
prefix.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import RlhfError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

WHERE = "direct weight sync"
SENDER, RECEIVER = 0, 1
"""Ranks of a link."""
_MAX_PENDING_CHUNKS = 4
_POLL_SECONDS = 0.001
_FORMED_SECONDS = 10.0
"""Maximum wait for the sender's end of a link whose receiver has reported that it is formed."""


class LinkError(RlhfError):
    """A link could not be formed or broke."""


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """Address and key that two processes need to form the ends of a new link."""

    host: str
    port: int
    key: str
    """Secret prefix of the link's keys in the store."""
    device: str
    """Device type of the weights, the same on both ends."""
    timeout_seconds: float
    """Maximum wait for the other end, when the link is formed and for each chunk."""


@dataclass(frozen=True, slots=True)
class DirectChunk:
    """Description of tensors that arrive over the link, one after the other."""

    first: int
    """Index of the first tensor among all tensors of this link, from 0."""
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, torch's name of the dtype, and shape of each tensor."""
    forward: tuple[tuple[str, int], ...] = ()
    """Makers to which the receiver forwards the tensors, and the index of the first one on the link to each."""

    @classmethod
    def of(cls, shard: Mapping[str, Tensor], first: int, forward: tuple[tuple[str, int], ...] = ()) -> DirectChunk:
        """Describe a shard whose first tensor has index `first`."""
        rows = ((name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in shard.items())
        return cls(first, tuple(rows), forward)

    def empty(self, device: torch.device) -> dict[str, Tensor]:
        """Allocate the tensors to receive. Raises `LinkError` if a dtype or shape is invalid."""
        import torch

        tensors = {}
        for name, dtype, shape in self.tensors:
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype) or any(size < 0 for size in shape):
                raise LinkError(f"no tensor has dtype {dtype!r} and shape {shape}", where=WHERE)
            tensors[name] = torch.empty(shape, dtype=kind, device=device)
        return tensors


def copy_to(shard: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy the shard to `device`, for any number of links."""
    import torch

    plain = torch.contiguous_format
    return {name: each.detach().to(device, copy=True, memory_format=plain) for name, each in shard.items()}


def _bits(tensor: Tensor) -> list[Tensor]:
    """The memory of a contiguous tensor as uint8, in the list that a process group expects."""
    import torch

    return [tensor.reshape(-1).view(torch.uint8)]


class Link:
    """One end of a link. Not thread-safe."""

    def __init__(self, group: Any, backend: str, device: torch.device, timeout_seconds: float) -> None:
        self.device = device
        self._group = group
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._sending: deque[list[tuple[Any, Tensor]]] = deque()

    def send(self, shard: Mapping[str, Tensor], first: int) -> None:
        """Start to send a shard, a copy from `copy_to`, once few other chunks are pending.

        Args:
            shard: Tensors by name, on the device of the link. They must not change until they are sent.
            first: Number of tensors sent over this link before. The other end must pass it to `receive`.

        Raises:
            LinkError: The link broke, or a previous chunk was not sent in time.
        """
        while len(self._sending) >= _MAX_PENDING_CHUNKS:
            self._wait_for_oldest()
        try:
            self._sending.append(
                [
                    (self._group.send(_bits(tensor), RECEIVER, number), tensor)
                    for number, tensor in enumerate(shard.values(), first)
                ]
            )
        except RuntimeError as error:
            raise self._broken(error) from None

    def wait_until_sent(self) -> None:
        """Wait until every chunk has been sent. Raises `LinkError` if the link broke or the wait timed out."""
        while self._sending:
            self._wait_for_oldest()

    def receive(self, chunk: DirectChunk) -> dict[str, Tensor]:
        """Receive the tensors of a chunk. Raises `LinkError` if the link broke or a tensor did not arrive in time."""
        tensors = chunk.empty(self.device)
        try:
            works = [
                self._group.recv(_bits(tensor), SENDER, number)
                for number, tensor in enumerate(tensors.values(), chunk.first)
            ]
        except RuntimeError as error:
            raise self._broken(error) from None
        for work in works:
            self._finish(work)
        return tensors

    def close(self) -> None:
        """Close the connection. Pending operations of the other end fail."""
        group, self._group = self._group, None
        self._sending.clear()
        if group is not None and self._backend == "nccl":
            group.abort()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._sending.popleft():
            self._finish(work)

    def _finish(self, work: Any) -> None:
        try:
            if self._backend == "gloo":
                work.wait(timedelta(seconds=self._timeout_seconds))
                return
            deadline = time.monotonic() + self._timeout_seconds
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise LinkError(f"waited {self._timeout_seconds:g} s for a chunk to cross", where=WHERE)
                time.sleep(_POLL_SECONDS)
            work.wait()  # raises the error of the operation
        except RuntimeError as error:
            raise self._broken(error) from None

    def _broken(self, error: RuntimeError) -> LinkError:
        return LinkError(f"the link broke: {first_line(error)}", where=WHERE)


class MakerEnd:
    """A maker's ends of its links: from the trainer or another maker, and to those that receive from this maker."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._next: dict[str, Future[Link]] = {}

    def join(self, offer: LinkOffer, address: str, device: torch.device) -> None:
        """Form the link over which this maker receives, which replaces the previous one, and close all others.

        Args:
            offer: Offer of the trainer.
            address: Address of this node.
            device: Device of the maker's model.

        Raises:
            LinkError: The link could not be formed in time.
        """
        self._close()
        self._link = join_link(offer, address, device, RECEIVER)

    def join_as_sender(self, receiver: str, offer: LinkOffer, address: str, device: torch.device) -> None:
        """Start to form the link to another maker, which replaces a previous one to it, and return at once.

        So this maker does not wait for a receiver that died.
        """
        self._next[receiver] = form_in_background(lambda: join_link(offer, address, device, SENDER))

    def receive(self, chunk: DirectChunk) -> dict[str, Tensor]:
        """Receive the tensors of a chunk and forward them. A `LinkError` also closes all links of this maker.

        A receiver whose link is broken notices that itself, and gets the chunk through the object store.
        """
        link, self._link = self._link, None
        try:
            if link is None:
                raise LinkError("this maker is not linked to a sender", where=WHERE)
            tensors = link.receive(chunk)
        except LinkError:
            self._close()
            raise
        self._link = link
        first = dict(chunk.forward)
        for name in self._next.keys() - first:
            self._drop_next(name)  # the trainer has placed it elsewhere
        for name in first:
            self._with_next(name, partial(Link.send, shard=tensors, first=first[name]))
        return tensors

    def wait_until_forwarded(self) -> None:
        """Wait until everything was forwarded, after which the tensors may change."""
        for name in list(self._next):
            self._with_next(name, Link.wait_until_sent)

    def _with_next(self, name: str, action: Callable[[Link], None]) -> None:
        """Use the link to another maker. If that fails, close it, so that its receiver does not wait."""
        if (forming := self._next.get(name)) is None:
            return
        try:
            action(forming.result(_FORMED_SECONDS))
        except (LinkError, TimeoutError) as error:
            logger.warning("weights are not forwarded to %s: %s", name, error or "its link is not formed")
            self._drop_next(name)

    def _drop_next(self, name: str) -> None:
        """Forget the link to another maker and close it, as soon as it is formed. Its receiver gets an error."""

        def close(formed: Future[Link]) -> None:
            if formed.exception() is None:
                formed.result().close()

        self._next.pop(name).add_done_callback(close)

    def _close(self) -> None:
        """Close all links. Their receivers get an error at once."""
        self._link = None
        for name in list(self._next):
            self._drop_next(name)


def form_in_background(form: Callable[[], Link]) -> Future[Link]:
    """Form a link on a separate thread, since torch's wait for the other end cannot be canceled."""
    formed: Future[Link] = Future()

    def run() -> None:
        try:
            formed.set_result(form())
        except Exception as error:  # its user raises it
            formed.set_exception(error)

    threading.Thread(target=run, name="link", daemon=True).start()
    return formed


def form_link(store: Store, rank: int, offer: LinkOffer, address: str) -> Link:
    """Form this process's end of a link, and wait until the other end is formed too.

    Args:
        store: Store through which the two ends find each other.
        rank: `SENDER` or `RECEIVER`.
        offer: Offer of the trainer.
        address: Address of this node, on which the link's sockets listen.

    Returns:
        The end of the link.

    Raises:
        LinkError: The link could not be formed in time.
    """
    import torch
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    backend = "nccl" if offer.device == "cuda" else "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    make = _nccl_group if backend == "nccl" else _gloo_group
    try:
        group = make(PrefixStore(offer.key, store), rank, address, timedelta(seconds=offer.timeout_seconds), device)
    except RuntimeError as error:
        raise LinkError(f"no {backend} link was formed: {first_line(error)}", where=WHERE) from None
    return Link(group, backend, device, offer.timeout_seconds)


def join_link(offer: LinkOffer, address: str, device: torch.device, rank: int) -> Link:
    """Form a maker's end of an offered link, for a model on `device`. Raises `LinkError` if that fails."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if device.type != offer.device:
        raise LinkError(f"the weights are on {offer.device}, the maker's model is on {device.type}", where=WHERE)
    timeout = timedelta(seconds=offer.timeout_seconds)
    try:
        store = TCPStore(offer.host, offer.port, None, is_master=False, timeout=timeout)
    except RuntimeError as error:
        problem = f"no trainer answers at {offer.host}:{offer.port}: {first_line(error)}"
        raise LinkError(problem, where=WHERE) from None
    return form_link(store, rank, offer, address)


def _gloo_group(store: Store, rank: int, address: str, timeout: timedelta, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, 2, options)


def _nccl_group(store: Store, rank: int, address: str, timeout: timedelta, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL

    # If a peer dies, this process must not exit (torch's default on any error), and its wait must still time out.
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = ProcessGroupNCCL(store, rank, 2, options)
        group.eager_connect_single_device(device)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return group
