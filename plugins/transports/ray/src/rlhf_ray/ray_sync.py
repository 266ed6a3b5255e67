"""The sending end of a weight sync: each shard once into the object store, its reference to all makers.

`RayWeightSync` tells the coordinator of a run, whose makers fetch; `MakerSync` calls makers that are used by hand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.models import next_token_logits
from rlhf_core.rollout import Checksum
from rlhf_core.strategy import Strategy, Trained
from rlhf_core.util import group_into_shards

from .calls import ActorLostError, Call, NamedActors, answer, ask, collect
from .messages import Canary
from .wire import num_bytes, pack

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_EVERYTHING = 1 << 62
"""Bytes of a shard under `sync: full`: one per model."""
_OBJECT_BYTES = 16 * 1024**2
"""Bytes of one object: makers read and check it while the next is written."""
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


@dataclass(slots=True)
class _Sent:
    """What went into the object store."""

    checksums: dict[str, str]
    num_chunks: int = 0
    num_bytes: int = 0


def _send(roles: Mapping[str, Shards], tell: Callable[[str, Any], None], *, sends: bool) -> _Sent:
    """Write each shard of every role once and `tell` its reference; where not `sends`, only help to gather them."""
    sent = _Sent({})
    for role, shards in roles.items():
        checksum = Checksum()
        for shard in shards:
            if not sends:
                continue
            checksum.add(shard)
            packed = pack(shard)
            sent.num_chunks += 1
            sent.num_bytes += num_bytes(packed)
            tell(role, ray.put(packed))
        sent.checksums[role] = checksum.hexdigest()
    return sent


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """What is sent, and in what pieces."""

    max_shard_bytes: int
    only: Mapping[str, frozenset[str]] | None
    """Role -> names of what is trained, for adapter-only syncs; None sends everything."""
    timeout_seconds: float

    @classmethod
    def of(
        cls, mode: str, max_shard_bytes: int, trained: Mapping[str, frozenset[str]], timeout_seconds: float
    ) -> SyncOptions:
        """`trained`: role -> names of its trained parameters (empty: all are)."""
        size = max_shard_bytes if mode == "chunked" else _EVERYTHING
        return cls(size, dict(trained) if mode == "adapter" else None, timeout_seconds)


class RayWeightSync:
    """Publishes the policy and, where there is one, the critic. Collective: the shards are gathered by all ranks.

    `publish` returns when every living maker holds the whole version beside its live weights, checked; each swaps it
    in between two batches of its own. One that starts later finds the newest version with the coordinator.
    """

    def __init__(
        self,
        coordinator: Any,
        strategy: Strategy,
        trained: Mapping[str, Trained],
        options: SyncOptions,
        canary_prompts: Sequence[tuple[int, ...]],
    ) -> None:
        self._coordinator = coordinator
        self._strategy = strategy
        self._trained = {role: trained[role] for role in ("policy", "critic") if role in trained}
        self._options = options
        self._canary_prompts = list(canary_prompts)
        self._report: SyncReport | None = None

    def publish(self, version: int) -> None:
        """Send `version` to all makers.

        Raises `SyncError` when a maker refuses it and `DeadlineError` when one does not take it in time.
        """
        started = time.perf_counter()
        strategy, coordinator = self._strategy, self._coordinator
        calls: list[Any] = []

        def tell(role: str, reference: Any) -> None:
            # Answered while the next part is written.
            calls.append(coordinator.add_weights.remote(version, role, [reference]))

        if strategy.is_main:
            ask(coordinator, "begin_weights", version, self._options.only is not None)
        sent = _send({role: self._shards(role) for role in self._trained}, tell, sends=strategy.is_main)
        for call in calls:
            answer(call, "add_weights")
        canary = self._canary()
        makers = 0

        def finish() -> None:
            nonlocal makers
            wait = self._options.timeout_seconds
            makers = ask(coordinator, "finish_weights", version, sent.checksums, canary, wait, wait_seconds=wait)
            ask(coordinator, "publish", version)

        strategy.run_on_main(finish)
        self._report = SyncReport(version, makers, sent.num_chunks, sent.num_bytes, time.perf_counter() - started)

    def metrics(self) -> dict[str, float]:
        """Of the last publish: bytes put into the object store (once for all makers), seconds, makers that have it."""
        if (last := self._report) is None:
            return {}
        return {
            "sync/bytes": float(last.num_bytes),
            "sync/seconds": last.seconds,
            "sync/makers": float(last.num_makers),
        }

    def _shards(self, role: str) -> Iterator[Mapping[str, Tensor]]:
        """Parts of an object's size. Collective, to its end."""
        model, size = self._trained[role].model, self._options.max_shard_bytes
        for shard in self._strategy.state_dict_shards(model, size, self._filter(role)):
            yield from group_into_shards(shard.items(), _OBJECT_BYTES)

    def _filter(self, role: str) -> Callable[[str], bool] | None:
        only = self._options.only
        # A critic without an adapter is trained, and sent, whole.
        return only[role].__contains__ if only is not None and only[role] else None

    def _canary(self) -> Canary | None:
        """Collective: a sharded model runs forward on all ranks."""
        if not self._canary_prompts:
            return None
        import torch

        model = self._trained["policy"].model
        was_training = model.training
        model.eval()
        with torch.no_grad(), self._strategy.autocast():
            logits = next_token_logits(model, self._canary_prompts, self._strategy.device)
        model.train(was_training)
        return Canary(self._canary_prompts, logits.float().log_softmax(dim=-1).cpu().numpy())


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
        untold = dict(lora_configs)

        def tell(role: str, reference: Any) -> None:
            lora = {_LORA_KEYWORDS[role]: untold.pop(role, None)}  # once is enough
            sending.send_chunk(**{_KEYWORDS[role]: reference}, **lora, **common)

        sending.wait(sending.call(chunk_start=True, **common))
        sent = _send(shards, tell, sends=bool(sending.names))
        sending.finish()
        sending.wait(sending.call(chunk_end=True, checksums=sent.checksums, **common))
        seconds = time.perf_counter() - started
        report = SyncReport(version, len(sending.names), sent.num_chunks, sent.num_bytes, seconds)
        logger.debug("sent weights: %s", report)
        return report


class _Sending:
    """One version on its way to the makers that are left."""

    def __init__(self, makers: NamedActors, names: list[str], timeout_seconds: float) -> None:
        self._makers = makers
        self.names = names
        self._timeout_seconds = timeout_seconds
        self._under_way: list[list[Call]] = []

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

    def send_chunk(self, **options: Any) -> None:
        """Call all makers with a chunk, once they have taken those before the last."""
        self._under_way.append(self.call(**options))
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
