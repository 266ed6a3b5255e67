"""What the driver does about trainers whose node is being drained. Makers that leave one: `test_cluster.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhf_ray.actors import Actors
from rlhf_ray.draining import take_request
from rlhf_ray.fleet import Fleet
from rlhf_ray.messages import Overview

VIEW = Overview(
    version=3, progress="", makers=(), trainers={}, queue=0, owned={}, sync_seconds=None, stuck={}, silent={}, events=()
)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Of a run with one trainer, on the node `here`, and no makers."""
    trainer = SimpleNamespace(name="trainer-0", node="here")
    config = SimpleNamespace(lease_seconds=60.0)
    actors = SimpleNamespace(trainers=[trainer], makers=[], num_makers=0, config=config)
    return Fleet(cast(Actors, actors), tmp_path, nodes_may_go=True)


@pytest.mark.parametrize(("node", "asked"), [("here", [1, 0, 1]), ("elsewhere", [0, 0, 0])])
def test_a_trainer_on_a_draining_node_is_asked_for_a_checkpoint_of_each_episode(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, asked: list[int]
) -> None:
    """So that a node that goes takes one episode with it, however long its notice is."""
    monkeypatch.setattr("rlhf_ray.fleet._NODES_SECONDS", 0.0)
    drained: dict[str, Any] = {}
    monkeypatch.setattr("rlhf_ray.fleet.draining_nodes", lambda: drained)
    fleet.step(VIEW)
    assert not take_request(tmp_path)
    drained[node] = 60.0
    taken = []
    for version in (3, 3, 4):
        fleet.step(replace(VIEW, version=version))
        taken.append(int(take_request(tmp_path)))
    assert taken == asked
