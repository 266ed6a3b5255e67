"""Sender of a weight sync, which sends every shard to all makers.

It puts a shard into the object store once and sends its reference to all makers, or sends it once over links, along
which makers forward it (`sending.py`). Makers receive the parts through `update_experience_maker`, both in a run and
when used directly.
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
from .link_tree import LinkTree
from .sending import Broadcast
from .wire import lora_scales

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_EVERYTHING = 1 << 62
"""Maximum bytes of a shard with `sync: full`: one shard per model."""
_OBJECT_BYTES = 16 * 1024**2
"""Size of one object in bytes. Makers read and check it while the next one is written."""
_KEYWORDS = {"policy": "new_actor_state_dict", "critic": "new_critic_state_dict"}
_LORA_KEYWORDS = {"policy": "new_actor_lora_config_dict", "critic": "new_critic_lora_config_dict"}


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of a sync."""

    version: int
    num_makers: int
    """Makers that have the version now, without those lost during the sync."""
    num_chunks: int
    num_bytes: int
    """Written to the object store, once for all makers."""
    seconds: float
    num_fallbacks: int
    """Makers that received a part through the object store: all of them without links."""


@dataclass
class MakerSync:
    """Sends versions of the policy and, if any, the critic. A chunk is serialized once for all makers."""

    strategy: Strategy
    trained: Mapping[str, TrainedModel]
    adapters: Mapping[str, frozenset[str]]
    """Role -> names of the weights in an adapter-only version. If empty, all weights of the role are sent."""
    makers: NamedActors
    _: KW_ONLY
    sender: str
    """Name of the trainer, which makers use to distinguish the versions of several trainers."""
    timeout_seconds: float
    """Maximum wait for the makers to take one part of a version."""
    report: SyncReport | None = None
    """Report of the last version."""
    _links: LinkTree | None = None

    def __post_init__(self) -> None:
        self._trained = {role: self.trained[role] for role in ("policy", "critic") if role in self.trained}

    def send(
        self,
        version: int,
        names: Iterable[str],
        *,
        adapter_only: bool,
        max_shard_bytes: int,
        log: list[dict[str, Any]] | None = None,
    ) -> None:
        """Send all weights, or the adapters, to makers. Collective, including ranks without makers.

        A maker that died is skipped, with a log message.

        Args:
            version: The new policy version.
            names: Names of the makers.
            adapter_only: Send only the adapters.
            max_shard_bytes: Maximum bytes of a shard.
            log: Receives all calls, which can be repeated for a maker that starts later.

        Raises:
            SyncError: A maker rejected the version.
            ActorLostError: All makers died, and there is no `log`.
            DeadlineError: A maker did not take a part in time.
        """
        started = time.perf_counter()
        timeout = self.timeout_seconds
        broadcast = Broadcast(
            self.makers, list(names), version=version, timeout_seconds=timeout, log=log, links=self._links
        )
        common = {"fully_update": not adapter_only, "version": version, "sender": self.sender}
        broadcast.call({"chunk_start": True, **common})
        checksums: dict[str, str] = {}
        num_chunks = size = 0
        for role in self._trained:
            checksum = Checksum()
            lora = {_LORA_KEYWORDS[role]: lora_scales(self.strategy.unwrap(self._trained[role].model)) or None}
            for shard in self.shards(role, max_shard_bytes, adapter_only=adapter_only):
                if not broadcast.names and log is None:
                    continue
                checksum.add(shard)
                num_chunks += 1
                size += broadcast.chunk(_KEYWORDS[role], shard, {**lora, **common})
                lora = {}  # sent only once
            checksums[role] = checksum.hexdigest()
        broadcast.call({"chunk_end": True, "checksums": checksums, **common})
        broadcast.wait_for_all()
        seconds, fallbacks = time.perf_counter() - started, len(broadcast.fallbacks)
        self.report = SyncReport(version, len(broadcast.names), num_chunks, size, seconds, fallbacks)
        logger.debug("sent weights: %s", self.report)

    def repeat(self, calls: Sequence[Mapping[str, Any]], names: Iterable[str], version: int) -> None:
        """Send a version again from its logged calls."""
        broadcast = Broadcast(self.makers, list(names), version=version, timeout_seconds=self.timeout_seconds, log=[])
        for call in calls:
            broadcast.call(dict(call))
        broadcast.wait_for_all()

    def shards(self, role: str, max_shard_bytes: int, *, adapter_only: bool) -> Iterator[Mapping[str, Tensor]]:
        """Yield the role's weights, or its adapter's, in parts of the size of an object. Collective until exhausted."""
        only = self.adapters[role].__contains__ if adapter_only and self.adapters[role] else None
        for shard in self.strategy.state_dict_shards(self._trained[role].model, max_shard_bytes, only):
            yield from group_into_shards(shard.items(), _OBJECT_BYTES)


class RunSync(MakerSync):
    """Publishes to the makers of a run. Collective.

    `publish` returns when every living maker holds the whole version, checked, next to its live weights. Each maker
    swaps it in between two of its batches. A maker that starts later gets the newest version from the coordinator.
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
            # Half of the time, so that the object store can be used after a link failed.
            self._links = LinkTree(strategy.device, timeout_seconds=timeout / 2)

    def publish(self, version: int) -> None:
        """Send `version` to all makers and release the prompts that wait for it. Raises the errors of `send`."""
        calls: list[dict[str, Any]] = []
        is_main = self.strategy.is_main
        makers: dict[str, Any] = ask(self._coordinator, "makers") if is_main else {}
        self.makers.add_handles(makers)
        if self._links is not None:
            self._links.open(makers)
        self.send(
            version,
            makers,
            adapter_only=self._adapter_only,
            max_shard_bytes=self._max_shard_bytes,
            log=calls if is_main else None,
        )

        def finish() -> None:
            updated = set(makers)
            while late := ask(self._coordinator, "publish", version, calls, updated):
                self.makers.add_handles(late)
                self.repeat(calls, late, version)
                updated |= late.keys()

        self.strategy.run_on_main(finish)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last publish.

        Returns:
            `sync/bytes` put into the object store (once for all makers), `sync/seconds`, `sync/makers`, and with links
            `sync/fallbacks`: the makers that received a part through the object store.
        """
        if (last := self.report) is None:
            return {}
        fallbacks = {} if self._links is None else {"sync/fallbacks": float(last.num_fallbacks)}
        return fallbacks | {
            "sync/bytes": float(last.num_bytes),
            "sync/seconds": last.seconds,
            "sync/makers": float(last.num_makers),
        }
