"""Events and log lines of an actor on their way to the driver."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from running import PATIENCE_SECONDS

from rlhf_ray.config import RayConfig
from rlhf_ray.coordinator_actor import Coordinator
from rlhf_ray.event_relay import EventSender
from rlhf_ray.messages import LogLine


@pytest.mark.usefixtures("local_ray")
def test_what_an_actor_sends_arrives_in_that_order() -> None:
    settings = RayConfig(prompts_per_lease=1, max_staleness=0, lease_seconds=60, heartbeat_seconds=60)
    coordinator: Any = (
        ray.remote(Coordinator)
        .options(num_cpus=0)
        .remote(settings, num_makers=1, num_episodes=1, prompts_per_episode=1)
    )
    try:
        sender = EventSender("m", coordinator)
        for number in range(300):
            sender.send(LogLine("m", 20, str(number)))
        sender.flush()
        view = ray.get(coordinator.overview.remote(0.0), timeout=PATIENCE_SECONDS)
        assert [line.text for line in view.events] == [str(number) for number in range(300)]
    finally:
        ray.kill(coordinator)
