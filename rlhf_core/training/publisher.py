"""`PolicyPublisher`: the trainer's weights as numbered versions, at whoever generates."""

from __future__ import annotations

from contextlib import nullcontext

from ..hooks.relay import HookRelay
from ..protocols import ExperienceChannel, WeightSync
from ..runfolder.metrics import PhaseTimer


class PolicyPublisher:
    """Publishes one version an episode, fires the hooks `rlhf_sync_…`, and tells the channel. One on every rank."""

    def __init__(self, sync: WeightSync, hooks: HookRelay, channel: ExperienceChannel | None = None) -> None:
        """`channel` holds prompts back until their version is out; None where nothing does."""
        self._sync = sync
        self._hooks = hooks
        self._channel = channel
        self.version = 0
        """Published last."""

    def publish(self, version: int, timer: PhaseTimer | None = None) -> None:
        """Bring the weights as they are now to all receivers, as `version`. Collective.

        timer: counts this as `sync`. Raises `SyncError` where a receiver stays at its old version.
        """
        with self._hooks.span("sync", version=version), nullcontext() if timer is None else timer.phase("sync"):
            self._sync.publish(version)
        self.version = version
        if self._channel is not None:
            self._channel.published(version)
