"""`MakerSync`: brings a trainer's weights to `ExperienceMakerHolder` actors, as whole versions."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.rollout import Checksum

from .calls import ActorLostError, Call, NamedActors, collect
from .wire import num_bytes, pack

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_CHUNKS_UNDER_WAY = 2
"""Chunks that makers may still be reading while the next is gathered: bounds the memory in the object store."""

_KEYWORDS = {"policy": "new_actor_state_dict", "critic": "new_critic_state_dict"}
_LORA_KEYWORDS = {"policy": "new_actor_lora_config_dict", "critic": "new_critic_lora_config_dict"}

Shards = Iterable[Mapping[str, "Tensor"]]


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did."""

    version: int
    num_makers: int
    """That have the version now; one that was lost on the way is left out."""
    num_chunks: int
    num_bytes: int
    """Written to the object store, once for all makers."""
    seconds: float


class MakerSync:
    """Sends versions to makers. A chunk is serialised once; all makers take it at the same time."""

    def __init__(self, makers: NamedActors, *, sender: str, timeout_seconds: float) -> None:
        """sender: name of the trainer, by which a maker tells the versions of several apart.
        timeout_seconds: longest wait for a maker to take one part of a version.
        """
        self._makers = makers
        self._sender = sender
        self._timeout_seconds = timeout_seconds

    def publish(
        self,
        version: int,
        shards: Mapping[str, Shards],
        *,
        names: Iterable[str],
        fully_update: bool,
        lora_configs: Mapping[str, Mapping[str, Any]],
    ) -> SyncReport:
        """Send all shards of every role (`policy`, `critic`) to the makers called `names`.

        The shards are read to their end even without makers, since gathering them may take all ranks. A maker that
        died is left out (and logged); when all did, raises `ActorLostError`. A maker that refuses raises `SyncError`.
        """
        started = time.perf_counter()
        sending = _Sending(self._makers, list(names), self._timeout_seconds)
        common = {"fully_update": fully_update, "version": version, "sender": self._sender}
        sending.wait(sending.call(chunk_start=True, **common))
        checksums: dict[str, str] = {}
        for role, parts in shards.items():
            checksum = Checksum()
            lora = lora_configs.get(role)
            for chunk in parts:
                checksum.add(chunk)
                sending.send_chunk(pack(chunk), _KEYWORDS[role], {**common, _LORA_KEYWORDS[role]: lora})
                lora = None  # once is enough
            checksums[role] = checksum.hexdigest()
        sending.finish()
        sending.wait(sending.call(chunk_end=True, checksums=checksums, **common))
        report = SyncReport(
            version, len(sending.names), sending.num_chunks, sending.num_bytes, time.perf_counter() - started
        )
        logger.debug("sent weights: %s", report)
        return report


class _Sending:
    """One version on its way to the makers that are left."""

    def __init__(self, makers: NamedActors, names: list[str], timeout_seconds: float) -> None:
        self._makers = makers
        self.names = names
        self._timeout_seconds = timeout_seconds
        self._under_way: list[list[Call]] = []
        self.num_chunks = 0
        self.num_bytes = 0

    def call(self, **options: Any) -> list[Call]:
        """Call all makers that are left, at the same time."""
        calls: list[Call] = []
        for name in list(self.names):
            try:
                maker = self._makers.handle(name)
            except ActorLostError as error:
                self._leave_out(name, error)
            else:
                calls.append((name, maker.update_experience_maker.remote(**options)))
        return calls

    def send_chunk(self, packed: Mapping[str, Any], keyword: str, options: Mapping[str, Any]) -> None:
        self.num_chunks += 1
        if not self.names:
            return
        self.num_bytes += num_bytes(packed)
        stored = ray.put(packed)
        self._under_way.append(self.call(**{keyword: stored}, **options))
        while len(self._under_way) > _CHUNKS_UNDER_WAY:
            self.wait(self._under_way.pop(0))

    def finish(self) -> None:
        while self._under_way:
            self.wait(self._under_way.pop(0))

    def wait(self, calls: list[Call]) -> None:
        """Take the makers' answers; go on without one that died."""
        for name, ref in calls:
            try:
                collect([(name, ref)], timeout_seconds=self._timeout_seconds, doing="to take new weights")
            except ActorLostError as error:
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: ActorLostError) -> None:
        logger.error("%s; it is left out of this weight sync", error)
        self._makers.lose(name)
        if name in self.names:
            self.names.remove(name)
            if not self.names:
                raise error
