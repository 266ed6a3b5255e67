"""Events and log lines of an actor on their way to the driver."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import ray
from running import PATIENCE_SECONDS

from rlhf_core.errors import RlhfError
from rlhf_core.hooks import HookRelay
from rlhf_ray.config import RayConfig
from rlhf_ray.coordinator_actor import Coordinator
from rlhf_ray.event_relay import ActorHooks, EventSender, Replay
from rlhf_ray.messages import Event, LogLine


@pytest.mark.usefixtures("local_ray")
def test_what_an_actor_sends_arrives_in_that_order() -> None:
    settings = RayConfig(prompts_per_lease=1, max_staleness=0, lease_seconds=60, heartbeat_seconds=60)
    coordinator: Any = (
        ray.remote(Coordinator)
        .options(num_cpus=0)
        .remote(settings, num_makers=1, num_episodes=1, prompts_per_episode=1)
    )
    try:
        # A flush has a short deadline, and the start of an actor may take longer.
        ray.get(coordinator.overview.remote(0.0), timeout=PATIENCE_SECONDS)
        sender = EventSender("m", coordinator)
        for number in range(300):
            sender.send(LogLine("m", 20, str(number)))
        sender.flush()
        view = ray.get(coordinator.overview.remote(0.0), timeout=PATIENCE_SECONDS)
        assert [line.text for line in view.events] == [str(number) for number in range(300)]
    finally:
        ray.kill(coordinator)


def test_events_that_the_driver_listens_to_are_sent_after_the_hooks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Plugin:
        def rlhf_episode_end(self, episode: int) -> None:
            seen.append(episode)

    def sent(self: EventSender, event: Event) -> None:
        seen.append((event.name, pickle.loads(event.arguments)))

    monkeypatch.setattr(EventSender, "send", sent)
    relay = ActorHooks(EventSender("m", None), {"episode_end", "metrics"})
    relay.register(Plugin())
    assert relay.listens("metrics") and not relay.listens("epoch_end")
    relay.fire("episode_end", episode=3, metrics={"a": 1}, error=ValueError("it broke"))
    first, (name, arguments) = seen
    assert (first, name, arguments["episode"], arguments["metrics"]) == (3, "episode_end", 3, {"a": 1})
    assert "ValueError: it broke" in str(arguments["error"])


def test_spans_of_a_trainer_that_died_are_closed_from_the_inside_out() -> None:
    seen: list[Any] = []

    class Plugin:
        def rlhf_episode_start(self, episode: int) -> None:
            seen.append(episode)

        def rlhf_episode_end(self, episode: int, metrics: Any, error: BaseException | None) -> None:
            seen.append((episode, metrics, error))

        def rlhf_fit_end(self, info: Any, error: BaseException | None) -> None:
            seen.append((info, error))

    def event(name: str, **arguments: Any) -> Event:
        return Event(name, pickle.dumps(arguments))

    hooks = HookRelay()
    hooks.register(Plugin())
    replay = Replay(hooks)
    replay([event("fit_start", info="i"), event("episode_start", episode=0)])
    replay([event("send_start", num_groups=1)])  # of a maker, whose spans overlap with others
    replay([event("episode_end", episode=0, metrics={"a": 1}, error=None), event("episode_start", episode=1)])
    lost = RlhfError("it was lost")
    replay.close(lost)
    replay.close(lost)
    assert seen == [0, (0, {"a": 1}, None), 1, (1, None, lost), ("i", lost)]
