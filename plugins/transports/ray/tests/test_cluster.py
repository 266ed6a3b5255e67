"""Several nodes on one machine: a many-to-many graph, and a node that goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlhf_core import train

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(site: Path) -> Iterator[Any]:
    """A head and two more nodes, each with room for one maker and one trainer."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=2)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_node_that_goes_takes_only_its_actors_along(
    cluster: Any,
    tmp_path: Path,
    run_file: Callable[..., dict[str, Any]],
    check_samples: Callable[[Path], None],
) -> None:
    """Its maker is started anew on a node that is left."""
    spare = cluster.add_node(num_cpus=1)
    run = run_file(
        {"episodes": 12}, num_makers=3, num_trainers=2, maker_cpus=1, trainer_cpus=1, address=cluster.address
    )
    run["strategy"] = "ddp"
    removed = threading.Event()

    def remove_when_it_runs() -> None:
        metrics = tmp_path / "ray" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            time.sleep(0.2)
        cluster.remove_node(spare, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        removed.set()

    thread = threading.Thread(target=remove_when_it_runs, daemon=True)
    thread.start()
    assert train(run, output=tmp_path / "ray") is not None
    thread.join(60)
    assert removed.is_set()
    check_samples(tmp_path / "ray")
