"""Several nodes on one machine: a many-to-many graph, and a node that goes."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from running import PATIENCE_SECONDS, wait_until

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
    """A maker's node is killed; the maker is started anew on the node that was free."""
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
        values = json.loads(status.read_text())
        makers, trainers = ({each["node"] for each in values[kind]} for kind in ("makers", "trainers"))
        # Ray attaches a driver to any node of its machine; without that one, and the coordinator there, no run goes on.
        driver = ray.get_runtime_context().get_node_id()
        for node in cluster.list_all_nodes():
            if node.node_id in makers - trainers - {driver}:
                os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
                removed.append(node.node_id)
                return

    thread = threading.Thread(target=remove_a_makers_node, daemon=True)
    thread.start()
    assert train(run, output=tmp_path / "ray") is not None
    thread.join(PATIENCE_SECONDS)
    assert removed
    check_samples(tmp_path / "ray")
    assert "is started anew" in (tmp_path / "ray" / "run.log").read_text()


def test_makers_of_a_preempted_node_give_their_prompts_back_before_it_goes(
    cluster: Any,
    tmp_path: Path,
    run_file: Callable[..., dict[str, Any]],
    check_samples: Callable[[Path], None],
    faults: Callable[[str], Path],
) -> None:
    """Ray is told as a cloud's notice is; what the maker holds is trained on or made again, and another comes."""
    folder = tmp_path / "ray"
    held = faults("trainer-waits")
    said: list[str] = []

    def state(kind: str) -> list[dict[str, Any]]:
        path = folder / "ray.json"
        return list(json.loads(path.read_text())[kind]) if path.exists() else []

    def preempt() -> None:
        wait_until(lambda: any("trains on" in each.get("doing", "") for each in state("trainers")), "an update")
        wait_until(lambda: sum(maker.get("waiting", 0) > 0 for maker in state("makers")) == 2, "samples of both")
        driver = ray.get_runtime_context().get_node_id()
        trainers = {each["node"] for each in state("trainers")}
        lost = next(maker for maker in state("makers") if maker["node"] not in {driver, *trainers})
        said.append(lost["name"])
        until = 1000 * (time.time() + 8)
        told = ray._raylet.GcsClient(address=cluster.address).drain_node(lost["node"], 2, "a spot machine", int(until))
        assert told[0], told
        wait_until(lambda: any(each["name"] == "maker-2" and each["pid"] for each in state("makers")), "another maker")
        held.unlink()

    thread = threading.Thread(target=preempt, daemon=True)
    thread.start()
    run = run_file({"episodes": 6}, num_makers=2, prompts_per_lease=1, maker_cpus=1, address=cluster.address)
    run["transport"] |= {"trainer_cpus": 1, "max_staleness": 2, "max_restarts": 0}
    assert train(run, output=folder) is not None
    thread.join(PATIENCE_SECONDS)
    check_samples(folder)
    log = (folder / "run.log").read_text()
    assert re.search(rf"{said[0]} leaves: its node is being drained, and goes in \d s at the latest", log)
    assert re.search(rf"{said[0]} (leaves at its deadline|has left); \d+ of its prompts will be made again", log)
