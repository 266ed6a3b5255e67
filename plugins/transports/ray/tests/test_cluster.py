"""Several nodes on one machine: a many-to-many graph, and a node that goes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from running import PATIENCE_SECONDS

from rlhf_core import train

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(site: Path) -> Iterator[Any]:
    """A head without room, and five nodes with room for one actor each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(5):
        made.add_node(num_cpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_node_that_goes_takes_only_its_actors_along(
    cluster: Any,
    tmp_path: Path,
    run_file: Callable[..., dict[str, Any]],
    ways: dict[str, Any],
    check_samples: Callable[[Path], None],
) -> None:
    """A maker's node is killed; the maker is restarted on the node that was free."""
    run = run_file(
        {"episodes": 30}, num_makers=2, num_trainers=2, maker_cpus=1, trainer_cpus=1, address=cluster.address, **ways
    )
    run["strategy"] = "ddp"
    removed: list[str] = []

    def remove_a_makers_node() -> None:
        status = tmp_path / "ray" / "ray.json"
        metrics = tmp_path / "ray" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 2 and status.exists()):
            time.sleep(0.2)
        # Ray attaches a driver to any node of its machine; without that one, and the coordinator there, no run goes on.
        driver = ray.get_runtime_context().get_node_id()
        while not removed:
            values = json.loads(status.read_text())  # may be from when nobody had come up yet
            makers, trainers = ({each["node"] for each in values[kind]} for kind in ("makers", "trainers"))
            for node in cluster.list_all_nodes():
                if node.node_id in makers - trainers - {driver}:
                    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
                    removed.append(node.node_id)
                    break
            time.sleep(0.2)

    thread = threading.Thread(target=remove_a_makers_node, daemon=True)
    thread.start()
    assert train(run, output=tmp_path / "ray") is not None
    thread.join(PATIENCE_SECONDS)
    assert removed
    check_samples(tmp_path / "ray")
    assert "is restarted" in (tmp_path / "ray" / "run.log").read_text()
