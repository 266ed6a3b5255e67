"""The sending end of a weight sync: each shard once into the object store, its reference to all makers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.models import next_token_logits
from rlhf_core.rollout import Checksum
from rlhf_core.strategy import Strategy, Trained
from rlhf_core.util import group_into_shards

from .calls import answer, ask
from .messages import Canary
from .wire import num_bytes, pack

if TYPE_CHECKING:
    from torch import Tensor

_EVERYTHING = 1 << 62
"""Bytes of a shard under `sync: full`: one per model."""
_OBJECT_BYTES = 16 * 1024**2
"""Bytes of one object: makers read and check it while the next is written."""


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
        self._last: dict[str, float] = {}

    def publish(self, version: int, shards: Iterable[Mapping[str, Tensor]]) -> None:
        """Send `version` to all makers. `shards` is not read: chunk size and part are this transport's own options.

        Raises `SyncError` when a maker refuses it and `DeadlineError` when one does not take it in time.
        """
        started = time.perf_counter()
        strategy, coordinator = self._strategy, self._coordinator
        if strategy.is_main:
            ask(coordinator, "begin_weights", version, self._options.only is not None)
        checksums, sent = self._send(version)
        canary = self._canary()
        makers = 0

        def finish() -> None:
            nonlocal makers
            wait = self._options.timeout_seconds
            makers = ask(coordinator, "finish_weights", version, checksums, canary, wait, wait_seconds=wait)
            ask(coordinator, "publish", version)

        strategy.run_on_main(finish)
        self._last = {
            "sync/bytes": float(sent),
            "sync/seconds": time.perf_counter() - started,
            "sync/makers": float(makers),
        }

    def metrics(self) -> dict[str, float]:
        """Of the last publish: bytes put into the object store (once for all makers), seconds, makers that have it."""
        return dict(self._last)

    def _send(self, version: int) -> tuple[dict[str, str], int]:
        checksums: dict[str, str] = {}
        sent = 0
        calls = []
        for role, trained in self._trained.items():
            checksum = Checksum()
            for shard in self._strategy.state_dict_shards(
                trained.model, self._options.max_shard_bytes, self._filter(role)
            ):
                if not self._strategy.is_main:
                    continue
                for part in group_into_shards(shard.items(), _OBJECT_BYTES):
                    checksum.add(part)
                    packed = pack(part)
                    sent += num_bytes(packed)
                    # Answered while the next part is written.
                    calls.append(self._coordinator.add_weights.remote(version, role, [ray.put(packed)]))
            checksums[role] = checksum.hexdigest()
        for call in calls:
            answer(call, "add_weights")
        return checksums, sent

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
