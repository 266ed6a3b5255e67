"""`PolicyPublisher`: publishes the trainer's weights as numbered versions to the engines."""

from __future__ import annotations

from contextlib import nullcontext

from ..hooks.relay import HookRelay
from ..protocols import ExperienceChannel, WeightSync
from ..runfolder.metrics import PhaseTimer


class PolicyPublisher:
    """Publishes one version per episode, fires the hooks `rlhf_sync_…`, and notifies the channel. One per rank."""

    def __init__(self, sync: WeightSync, hooks: HookRelay, channel: ExperienceChannel | None = None) -> None:
        """`channel`: holds prompts back until their version is published; None if there is none."""
        self._sync = sync
        self._hooks = hooks
        self._channel = channel
        self.version = 0
        """Published last."""

    def publish(self, version: int, timer: PhaseTimer | None = None) -> None:
        """Send the current weights to all receivers as `version`. Collective.

        timer: counts this as `sync`. Raises `SyncError` where a receiver keeps its old version.
        """
        with self._hooks.span("sync", version=version), nullcontext() if timer is None else timer.phase("sync"):
            self._sync.publish(version)
        self.version = version
        if self._channel is not None:
            self._channel.published(version)
