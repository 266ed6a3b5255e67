"""The entry point of the reward `http`."""

from __future__ import annotations

from rlhf_core.components import Component

from .config import HttpRewardConfig

http = Component(
    summary="Scores from a server, by a documented JSON protocol over HTTP.",
    config=HttpRewardConfig,
    build="rlhf_reward_http.client:build",
)
