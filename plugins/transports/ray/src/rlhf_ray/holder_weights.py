"""Stages a maker's new weights until the version is complete and no batch is being generated.

Chunks arrive on one thread while another makes experience. They are held next to the live weights, checked when the
version is complete, and swapped in between rollout batches, so a sample has one version and generation waits only for
the swap. With weights in flight, the computing thread triggers the swap (`take`). No lock is held between two calls: a
sender that dies leaves only chunks, which are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlhf_core.errors import DeadlineError, SyncError
from rlhf_core.rollout import named_weights, replace_weights, verify_weights

from .checksum import Checksum
from .wire import LoraScales, check_lora_scales

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)
WHERE = "weight sync"


@dataclass(slots=True)
class _Incoming:
    """A version that is being sent."""

    version: int
    sender: str
    adapter_only: bool
    last_chunk: float
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Role -> name -> tensor."""
    checksums: dict[str, Checksum] = field(default_factory=dict)
    """Role -> checksum of the weights that have arrived."""

    def add(self, role: str, chunk: Mapping[str, Tensor]) -> None:
        """Add a chunk and its checksum at once, while the sender prepares the next."""
        self.weights.setdefault(role, {}).update(chunk)
        self.checksums.setdefault(role, Checksum()).add(chunk)
        self.last_chunk = time.monotonic()

    def replaces(self, other: _Incoming) -> bool:
        """Whether this version overwrites all weights of `other`."""
        return other.weights.keys() <= self.weights.keys() and (other.adapter_only or not self.adapter_only)


class StagedWeights:
    """Whole versions for the models of a maker, by role (`policy`, `critic`). Thread-safe.

    Each sender has one open version, independent of the others. The last commit wins.

    Example:
        weights = StagedWeights({"policy": model})
        weights.begin(version=1)
        for chunk in chunks:
            weights.stage(1, "policy", chunk)
        weights.commit(1, {"policy": checksum})
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        adapters: Mapping[str, frozenset[str]] = MappingProxyType({}),
        *,
        idle_seconds: float = 600.0,
        published: Callable[[int], None] = lambda version: None,
    ) -> None:
        """Create the stage.

        Args:
            models: Role -> live model.
            adapters: Role -> names of the weights in an adapter-only version. Empty without an adapter.
            idle_seconds: Time without a chunk after which a version is dropped, since its sender is presumed dead.
            published: Called with each version after it was swapped in.
        """
        self._published = published
        self._models = models
        self._adapters = adapters
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._incoming: dict[str, _Incoming] = {}
        self._ready: list[_Incoming] = []
        self._making = False
        self._closed = False
        self._live: dict[str, int] = {}
        """Sender -> version that was swapped in last. A run that was rolled back sends a lower version."""

    @property
    def newest(self) -> int | None:
        """The live version, the highest of all senders. None before the first."""
        with self._changed:
            return max(self._live.values(), default=None)

    def begin(self, version: int, *, sender: str = "", adapter_only: bool = False) -> None:
        """Open a version. An incomplete version of the same sender is dropped."""
        with self._changed:
            self._drop_idle()
            self._incoming[sender] = _Incoming(version, sender, adapter_only, time.monotonic())

    def stage(
        self,
        version: int,
        role: str,
        chunk: Mapping[str, Tensor],
        *,
        sender: str = "",
        scales: LoraScales | None = None,
    ) -> None:
        """Hold a chunk. Its tensors are referenced, not copied, and must not change before the swap.

        Args:
            version: The open version.
            role: Role of the model.
            chunk: Tensors by name.
            sender: Name of the sender.
            scales: LoRA scales of the sender, which must equal those of the role's model. None skips the check.

        Raises:
            SyncError: The maker lacks the role, the scales differ, or the version is not open.
        """
        if role not in self._models:
            raise SyncError(f"weights of a {role} arrived, this maker has {sorted(self._models)}", where=WHERE)
        check_lora_scales(self._models[role], scales)
        with self._changed:
            incoming = self._open(version, sender)
        incoming.add(role, chunk)

    def commit(self, version: int, checksums: Mapping[str, str] | None = None, *, sender: str = "") -> None:
        """Complete the version: check it, then swap it in, now or at the end of the current batch.

        Args:
            version: The open version.
            checksums: Role -> `Checksum` of the sent weights, for all roles of the version. None skips the check.
            sender: Name of the sender.

        Raises:
            SyncError: Weights are missing, unknown or different. The live weights are kept.
        """
        with self._changed:
            incoming = self._open(version, sender)
            del self._incoming[sender]
        self._check(incoming, checksums)
        with self._changed:
            self._ready = [other for other in self._ready if not incoming.replaces(other)]
            self._ready.append(incoming)
            if not self._making:
                self._swap()

    def wait_live(self, version: int, *, timeout_seconds: float) -> None:
        """Wait until the next sample will use `version` or a newer one. Raises `DeadlineError` after the timeout."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: any(live >= version for live in self._live.values()), timeout_seconds
            )
            if not arrived:
                raise DeadlineError(
                    f"waited {timeout_seconds:g} s for policy version {version}, the maker has "
                    f"{max(self._live.values(), default=None)}",
                    where=WHERE,
                    hint="check that its trainers publish and that the maker finishes its batch",
                )

    def take(self) -> None:
        """Swap in complete versions. Call from the thread inside `making`, while nothing is being computed."""
        if self._ready:  # read without the lock: a version missed now is taken at the next step
            with self._changed:
                self._swap()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Context for one batch, during which only `take` changes the weights. For one thread at a time."""
        with self._changed:
            self._drop_idle()
            self._swap()
            self._making = True
        try:
            yield
        finally:
            with self._changed:
                self._making = False
                self._swap()

    def close(self) -> None:
        """Stop swapping weights, since no more samples will be made. Later versions are accepted and discarded."""
        with self._changed:
            self._closed = True

    def _open(self, version: int, sender: str) -> _Incoming:
        incoming = self._incoming.get(sender)
        if incoming is None or incoming.version != version:
            current = "no version is" if incoming is None else f"version {incoming.version} is"
            raise SyncError(
                f"a part of version {version} arrived from {sender or 'a sender'}, but {current} open",
                where=WHERE,
                hint="start the version first. A version without a chunk for too long is dropped",
            )
        return incoming

    def _check(self, incoming: _Incoming, checksums: Mapping[str, str] | None) -> None:
        version = incoming.version
        if not incoming.weights:
            raise SyncError(f"version {version} was committed without any weights", where=WHERE)
        if checksums is not None and checksums.keys() != incoming.weights.keys():
            raise SyncError(
                f"version {version} should contain {sorted(checksums)}, but {sorted(incoming.weights)} arrived",
                where=WHERE,
            )
        for role, arrived in incoming.weights.items():
            only = self._sent(role, incoming.adapter_only)
            live = {n: each for n, each in named_weights(self._models[role]).items() if only is None or only(n)}
            verify_weights(live, arrived, version)
            if checksums is not None and incoming.checksums[role].hexdigest() != checksums[role]:
                raise SyncError(f"the {role} of version {version} differs from the one sent (checksum)", where=WHERE)

    def _sent(self, role: str, adapter_only: bool) -> Callable[[str], bool] | None:
        """Filter for the names of a model's weights in a version. None means all."""
        if not adapter_only:
            return None
        if not self._adapters.get(role):
            raise SyncError(
                "an adapter arrived, but the maker's model does not have one",
                where=WHERE,
                hint="build the same LoRA model in the maker's and the trainer's model_fn",
            )
        return self._adapters[role].__contains__

    def _swap(self) -> None:
        """Swap in complete versions. Call with the condition held, while nothing is being computed."""
        ready, self._ready = self._ready, []
        for incoming in () if self._closed else ready:
            for role, arrived in incoming.weights.items():
                only = self._sent(role, incoming.adapter_only)
                replace_weights(self._models[role], arrived, incoming.version, only=only)
            self._live[incoming.sender] = incoming.version
            self._published(incoming.version)
        self._changed.notify_all()

    def _drop_idle(self) -> None:
        now = time.monotonic()
        for sender, incoming in list(self._incoming.items()):
            if now - incoming.last_chunk > self._idle_seconds:
                logger.warning(
                    "version %d of %s received no chunk for %g s and was dropped",
                    incoming.version,
                    sender or "an unnamed sender",
                    self._idle_seconds,
                )
                del self._incoming[sender]
