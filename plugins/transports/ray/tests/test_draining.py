"""What the driver does about trainers whose node is being drained. Makers that leave one: `test_cluster.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhf_core.hookspecs import Moment
from rlhf_ray.actors import Actors
from rlhf_ray.coordinator_actor import Coordinator, CoordinatorSettings
from rlhf_ray.fleet import Fleet
from rlhf_ray.messages import Overview
from rlhf_ray.trainer_actor import DrainingCheckpoints

VIEW = Overview(
    version=3, progress="", makers=(), trainers={}, queue=0, owned={}, sync_seconds=None, stuck={}, silent={}, events=()
)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Of a run with one trainer, on the node `here`, and no makers."""
    trainer = SimpleNamespace(name="trainer-0", node="here")
    config = SimpleNamespace(lease_seconds=60.0)
    settings = CoordinatorSettings(
        num_makers=0,
        num_episodes=1,
        prompts_per_episode=1,
        prompts_per_lease=None,
        max_staleness=0,
        lease_seconds=60.0,
        heartbeat_seconds=60.0,
    )
    coordinator = Coordinator(settings)
    request = SimpleNamespace(remote=lambda: asyncio.run(coordinator.request_checkpoint()))
    handle = SimpleNamespace(request_checkpoint=request, real=coordinator)
    actors = SimpleNamespace(trainers=[trainer], makers=[], num_makers=0, config=config, coordinator=handle)
    return Fleet(cast(Actors, actors), tmp_path, nodes_may_go=True)


@pytest.mark.parametrize(("node", "is_asked"), [("here", True), ("elsewhere", False)])
def test_a_trainer_on_a_draining_node_is_asked_for_a_checkpoint_of_each_episode(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, node: str, is_asked: bool
) -> None:
    """So that a node that goes takes one episode with it, however long its notice is."""
    coordinator = fleet._actors.coordinator.real
    monkeypatch.setattr("rlhf_ray.fleet._NODES_SECONDS", 0.0)
    drained: dict[str, Any] = {}
    monkeypatch.setattr("rlhf_ray.fleet.draining_nodes", lambda: drained)

    def ask(of: Any, method: str) -> Any:
        return asyncio.run(getattr(of, method)())

    monkeypatch.setattr("rlhf_ray.trainer_actor.ask", ask)
    hook = DrainingCheckpoints(coordinator)

    def decided(at: str) -> list[str]:
        moment = Moment(at=cast(Any, at), step=1, episode=0, metrics={})
        return [action.kind for action in hook.rlhf_decide(moment=moment)]

    fleet.step(VIEW)
    assert decided("episode") == []
    drained[node] = 60.0
    for _ in range(2):
        fleet.step(VIEW)
        assert decided("update") == []
        assert decided("episode") == ["checkpoint"] * is_asked
        assert decided("episode") == []
