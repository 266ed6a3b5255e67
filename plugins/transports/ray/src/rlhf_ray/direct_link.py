"""A direct link: a process group of one trainer and one maker, over which the bytes of weights go.

Pairs rather than one group of all, so that a maker that dies breaks its own link only, and one that comes later needs
nobody else's. torch's default group, which a trainer may need for its strategy, is left alone. Ray's own direct
transport is not used: its gloo and NCCL groups are made and called without deadlines, an actor may be in one group
only, and a failed transfer cannot be aborted.

Nothing that arrives is unpickled: a link carries bytes, of which Ray's authenticated call has told dtype and shape.
The group's store and gloo's sockets listen on the address that Ray uses for the node; keys in the store have a random
prefix.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import RlhfError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

WHERE = "direct weight sync"
SENDER, RECEIVER = 0, 1
"""Ranks of a link."""
_CHUNKS_UNDER_WAY = 4
_POLL_SECONDS = 0.001


class LinkError(RlhfError):
    """A link could not be formed, or broke."""


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """Where a maker finds its end of a new link."""

    host: str
    port: int
    key: str
    """Prefix of the link's keys in the store; nobody else knows it."""
    device: str
    """Device type of the weights, of both ends."""
    timeout_seconds: float
    """Longest wait for the other end, when the link is formed and for each chunk."""


@dataclass(frozen=True, slots=True)
class DirectChunk:
    """Tensors that come over the link, one after the other."""

    first: int
    """Number of the first among all tensors of this link, from 0."""
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, torch's name of the dtype, shape."""

    @classmethod
    def of(cls, shard: Mapping[str, Tensor], first: int) -> DirectChunk:
        """What is told of a shard."""
        told = ((name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in shard.items())
        return cls(first, tuple(told))

    def empty(self, device: torch.device) -> dict[str, Tensor]:
        """Tensors to receive it in. Raises `LinkError` where there can be none such."""
        import torch

        found = {}
        for name, dtype, shape in self.tensors:
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype) or any(size < 0 for size in shape):
                raise LinkError(f"no tensor has dtype {dtype!r} and shape {shape}", where=WHERE)
            found[name] = torch.empty(shape, dtype=kind, device=device)
        return found


def copied(shard: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A copy of the shard on `device`, to be sent over any number of links."""
    import torch

    plain = torch.contiguous_format
    return {name: each.detach().to(device, copy=True, memory_format=plain) for name, each in shard.items()}


def _bits(tensor: Tensor) -> list[Tensor]:
    """The memory of a contiguous tensor, as a process group takes it."""
    import torch

    return [tensor.reshape(-1).view(torch.uint8)]


class Link:
    """One end of a link. Not safe between threads."""

    def __init__(self, group: Any, backend: str, device: torch.device, timeout_seconds: float) -> None:
        self.device = device
        self._group = group
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._num_sent = 0
        self._sending: deque[list[tuple[Any, Tensor]]] = deque()

    def send(self, shard: Mapping[str, Tensor]) -> DirectChunk:
        """Begin to send a shard, see `copied`, once few are under way. Raises `LinkError`.

        The other end is to call `receive` with the result.
        """
        while len(self._sending) >= _CHUNKS_UNDER_WAY:
            self._settle_one()
        chunk = DirectChunk.of(shard, self._num_sent)
        self._num_sent += len(shard)
        try:
            self._sending.append(
                [
                    (self._group.send(_bits(tensor), RECEIVER, number), tensor)
                    for number, tensor in enumerate(shard.values(), chunk.first)
                ]
            )
        except RuntimeError as error:
            raise self._broken(error) from None
        return chunk

    def settle(self) -> None:
        """Wait until every chunk has gone. Raises `LinkError`, also when that takes too long."""
        while self._sending:
            self._settle_one()

    def receive(self, chunk: DirectChunk) -> dict[str, Tensor]:
        """The tensors of a chunk. Raises `LinkError`, also when one does not come in time."""
        found = chunk.empty(self.device)
        try:
            works = [
                self._group.recv(_bits(tensor), SENDER, number)
                for number, tensor in enumerate(found.values(), chunk.first)
            ]
        except RuntimeError as error:
            raise self._broken(error) from None
        for work in works:
            self._finish(work)
        return found

    def close(self) -> None:
        """Close the connection; what the other end waits for fails."""
        group, self._group = self._group, None
        self._sending.clear()
        if group is not None and self._backend == "nccl":
            group.abort()

    def _settle_one(self) -> None:
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
            work.wait()  # raises what went wrong
        except RuntimeError as error:
            raise self._broken(error) from None

    def _broken(self, error: RuntimeError) -> LinkError:
        return LinkError(f"the link broke: {first_line(error)}", where=WHERE)


class MakerEnd:
    """A maker's end of the link to its trainer; a new one replaces it."""

    def __init__(self) -> None:
        self._link: Link | None = None

    def join(self, offer: LinkOffer, address: str, device: torch.device) -> None:
        """Form the link. address: of this node. device: of the maker's model. Raises `LinkError`."""
        self._link = None
        self._link = join_link(offer, address, device)

    def receive(self, chunk: DirectChunk) -> dict[str, Tensor]:
        """The tensors of a chunk. After a `LinkError` there is no link."""
        link, self._link = self._link, None
        if link is None:
            raise LinkError("this maker has no link", where=WHERE)
        found = link.receive(chunk)
        self._link = link
        return found


def form_link(store: Store, rank: int, offer: LinkOffer, address: str) -> Link:
    """This process's end, once the other end is formed too. Raises `LinkError`, also when that takes too long.

    address: of this node, where the link's sockets are to listen.
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


def join_link(offer: LinkOffer, address: str, device: torch.device) -> Link:
    """The maker's end of an offered link. device: of its model."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if device.type != offer.device:
        raise LinkError(f"the weights are on {offer.device}, the maker's model is on {device.type}", where=WHERE)
    timeout = timedelta(seconds=offer.timeout_seconds)
    try:
        store = TCPStore(offer.host, offer.port, None, is_master=False, timeout=timeout)
    except RuntimeError as error:
        told = f"no trainer answers at {offer.host}:{offer.port}: {first_line(error)}"
        raise LinkError(told, where=WHERE) from None
    return form_link(store, RECEIVER, offer, address)


def _gloo_group(store: Store, rank: int, address: str, timeout: timedelta, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, 2, options)


def _nccl_group(store: Store, rank: int, address: str, timeout: timedelta, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL

    # A peer that dies must end neither this process (torch's default on any error) nor the wait for it.
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = ProcessGroupNCCL(store, rank, 2, options)
        group.eager_connect_single_device(device)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return group
