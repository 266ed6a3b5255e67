"""Sender of a weight sync: puts each shard into the object store once and sends its reference to all makers, or sends
it over a link to each (`sending.py`).

Makers receive the parts through `update_experience_maker`, both in a run and when used directly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.strategy import Strategy, TrainedModel
from rlhf_strategies import group_into_shards

from .calls import NamedActors, ask
from .checksum import Checksum
from .config import RayConfig
from .sending import Links, Sending
from .wire import lora_scales

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_EVERYTHING = 1 << 62
"""Bytes of a shard under `sync: full`: one per model."""
_OBJECT_BYTES = 16 * 1024**2
"""Size of one object; makers read and check it while the next is written."""
_KEYWORDS = {"policy": "new_actor_state_dict", "critic": "new_critic_state_dict"}
_LORA_KEYWORDS = {"policy": "new_actor_lora_config_dict", "critic": "new_critic_lora_config_dict"}


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of a sync."""

    version: int
    num_makers: int
    """Makers that have the version now; without those lost during the sync."""
    num_chunks: int
    num_bytes: int
    """Written to the object store, once for all makers."""
    seconds: float
    num_fallbacks: int
    """Makers that got a part of it through the object store: all of them where there are no links."""


@dataclass
class MakerSync:
    """Sends versions of the policy and, where there is one, the critic. A chunk is serialised once for all makers."""

    strategy: Strategy
    trained: Mapping[str, TrainedModel]
    adapters: Mapping[str, frozenset[str]]
    """Role -> names in an adapter-only version; all of the role's weights where there are none."""
    makers: NamedActors
    _: KW_ONLY
    sender: str
    """Name of the trainer, by which a maker keeps the versions of several trainers apart."""
    timeout_seconds: float
    """Longest wait for the makers to take one part of a version."""
    report: SyncReport | None = None
    """Of the last version."""
    _links: Links | None = None

    def __post_init__(self) -> None:
        self._trained = {role: self.trained[role] for role in ("policy", "critic") if role in self.trained}

    def send(
        self,
        version: int,
        names: Iterable[str],
        *,
        adapter_only: bool,
        max_shard_bytes: int,
        kept: list[dict[str, Any]] | None = None,
    ) -> None:
        """Send all weights, or the adapters, to the makers called `names`. Collective, also for ranks without makers.

        kept: receives all calls, to repeat for a maker that starts later. Without it, the death of all makers is an
        error. A maker that died is left out (and logged). Raises `SyncError` when one refuses the version,
        `ActorLostError`, or `DeadlineError` when one does not take a part in time.
        """
        started = time.perf_counter()
        timeout = self.timeout_seconds
        sending = Sending(
            self.makers, list(names), version=version, timeout_seconds=timeout, kept=kept, links=self._links
        )
        common = {"fully_update": not adapter_only, "version": version, "sender": self.sender}
        sending.call({"chunk_start": True, **common})
        checksums: dict[str, str] = {}
        num_chunks = size = 0
        for role in self._trained:
            checksum = Checksum()
            lora = {_LORA_KEYWORDS[role]: lora_scales(self.strategy.unwrap(self._trained[role].model)) or None}
            for shard in self.shards(role, max_shard_bytes, adapter_only=adapter_only):
                if not sending.names and kept is None:
                    continue
                checksum.add(shard)
                num_chunks += 1
                size += sending.chunk(_KEYWORDS[role], shard, {**lora, **common})
                lora = {}  # sent only once
            checksums[role] = checksum.hexdigest()
        sending.call({"chunk_end": True, "checksums": checksums, **common})
        sending.wait_for_all()
        seconds, fallbacks = time.perf_counter() - started, len(sending.fallbacks)
        self.report = SyncReport(version, len(sending.names), num_chunks, size, seconds, fallbacks)
        logger.debug("sent weights: %s", self.report)

    def repeat(self, calls: Sequence[Mapping[str, Any]], names: Iterable[str], version: int) -> None:
        """Send a version again from its kept calls."""
        sending = Sending(self.makers, list(names), version=version, timeout_seconds=self.timeout_seconds, kept=[])
        for call in calls:
            sending.call(dict(call))
        sending.wait_for_all()

    def shards(self, role: str, max_shard_bytes: int, *, adapter_only: bool) -> Iterator[Mapping[str, Tensor]]:
        """The role's weights, or its adapter's, in parts of an object's size. Collective until exhausted."""
        only = self.adapters[role].__contains__ if adapter_only and self.adapters[role] else None
        for shard in self.strategy.state_dict_shards(self._trained[role].model, max_shard_bytes, only):
            yield from group_into_shards(shard.items(), _OBJECT_BYTES)


class RunSync(MakerSync):
    """Publishes to the makers of a run. Collective.

    `publish` returns when every living maker holds the whole version, checked, beside its live weights; each swaps it
    in between two of its batches. A maker that starts later gets the newest version from the coordinator.
    """

    def __init__(
        self,
        coordinator: Any,
        strategy: Strategy,
        trained: Mapping[str, TrainedModel],
        adapters: Mapping[str, frozenset[str]],
        config: RayConfig,
    ) -> None:
        timeout = config.sync_timeout_seconds
        makers = NamedActors([], timeout_seconds=timeout)
        super().__init__(strategy, trained, adapters, makers, sender="trainers", timeout_seconds=timeout)
        self._coordinator = coordinator
        self._adapter_only = config.sync == "adapter"
        self._max_shard_bytes = config.max_shard_bytes if config.sync in ("chunked", "direct") else _EVERYTHING
        if config.sync == "direct" and strategy.is_main:
            # Half, so that a link that fails leaves time for the other way.
            self._links = Links(strategy.device, timeout_seconds=timeout / 2)

    def publish(self, version: int) -> None:
        """Send `version` to all makers and release the prompts that wait for it. Raises like `send`."""
        calls: list[dict[str, Any]] = []
        is_main = self.strategy.is_main
        makers: dict[str, Any] = ask(self._coordinator, "makers") if is_main else {}
        self.makers.know(makers)
        if self._links is not None:
            self._links.open(makers)
        self.send(
            version,
            makers,
            adapter_only=self._adapter_only,
            max_shard_bytes=self._max_shard_bytes,
            kept=calls if is_main else None,
        )

        def finish() -> None:
            told = set(makers)
            while late := ask(self._coordinator, "publish", version, calls, told):
                self.makers.know(late)
                self.repeat(calls, late, version)
                told |= late.keys()

        self.strategy.run_on_main(finish)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last publish: bytes put into the object store (once for all makers), seconds, makers; with
        links also the makers that were not served by theirs.
        """
        if (last := self.report) is None:
            return {}
        fallbacks = {} if self._links is None else {"sync/fallbacks": float(last.num_fallbacks)}
        return fallbacks | {
            "sync/bytes": float(last.num_bytes),
            "sync/seconds": last.seconds,
            "sync/makers": float(last.num_makers),
        }
