"""`sync: direct` against makers that only write down what arrives: links that fail at the worst moments."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import ray.cloudpickle
import torch
from running import PATIENCE_SECONDS
from torch import Tensor, nn

from rlhf_core.errors import SyncError
from rlhf_core.strategy import TrainedModel
from rlhf_ray.calls import node_address
from rlhf_ray.config import RayConfig
from rlhf_ray.coordinator_actor import Coordinator
from rlhf_ray.direct_link import DirectChunk, Link, LinkError, LinkOffer, MakerEnd
from rlhf_ray.ray_sync import RunSync
from rlhf_ray.wire import unpack
from rlhf_strategies import state_dict_shards_of

pytestmark = pytest.mark.usefixtures("local_ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

BY_LINK, BY_STORE = "by link", "by store"


class OneProcess:
    """What a sync asks of a strategy."""

    is_main = True
    device = torch.device("cpu")
    state_dict_shards = staticmethod(state_dict_shards_of)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def run_on_main(self, action: Callable[[], None]) -> None:
        action()


@ray.remote(num_cpus=0)
class Maker:
    """Writes down how each chunk came; `fault` strikes at the second of the first version."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.end = MakerEnd()
        self.ways: list[str] = []
        self.arrived: dict[str, Tensor] = {}
        self.links = 0

    def join_link(self, offer: LinkOffer) -> None:
        if self.fault == "dies when asked":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault in ("cannot link", "cannot link once"):
            self.fault = self.fault if self.fault == "cannot link" else ""
            raise LinkError("no route to the trainer", where="direct weight sync")
        self.links += 1
        self.end.join(offer, node_address(), torch.device("cpu"))

    def join_link_as_sender(self, receiver: str, offer: LinkOffer) -> None:
        self.end.join_as_sender(receiver, offer, node_address(), torch.device("cpu"))

    def get_policy_version(self) -> int:
        if self.fault == "dies as sender":
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def update_experience_maker(self, **call: Any) -> None:
        if call.get("chunk_end"):
            self.end.wait_until_forwarded()
        if call.get("chunk_start"):
            self.ways, self.arrived = [], {}
        chunk = call.get("new_actor_state_dict")
        if chunk is None:
            return
        if self.fault and len(self.ways) == 1 and isinstance(chunk, DirectChunk):
            fault, self.fault = self.fault, ""
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "refuses":
                raise SyncError("wrong scales", where="weight sync")
            if fault == "hangs up":
                self.end._link = None
        self.arrived.update(self.end.receive(chunk) if isinstance(chunk, DirectChunk) else unpack(chunk))
        self.ways.append(BY_LINK if isinstance(chunk, DirectChunk) else BY_STORE)

    def told(self) -> tuple[list[str], int, dict[str, Tensor]]:
        return self.ways, self.links, self.arrived


@pytest.fixture
def run() -> Iterator[Callable[..., tuple[RunSync, dict[str, Any]]]]:
    """run(name=fault, …) -> the sync of a run of such makers, and their handles."""
    started: list[Any] = []

    def begin(**faults: str) -> tuple[RunSync, dict[str, Any]]:
        settings = RayConfig(prompts_per_lease=1, max_staleness=0, lease_seconds=60, heartbeat_seconds=60)
        coordinator: Any = (
            ray.remote(Coordinator)
            .options(num_cpus=0)
            .remote(settings, num_makers=len(faults), num_episodes=1, prompts_per_episode=1)
        )
        makers = {name: Maker.remote(fault) for name, fault in faults.items()}
        started.extend([coordinator, *makers.values()])
        for name, maker in makers.items():
            ray.get(coordinator.register.remote(name, 1, "n", 0, maker), timeout=PATIENCE_SECONDS)
        strategy: Any = OneProcess()
        trained = {"policy": TrainedModel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), None, None)}  # type: ignore[arg-type]
        config = RayConfig(sync="direct", max_shard_bytes=1024, sync_timeout_seconds=PATIENCE_SECONDS)
        sync = RunSync(coordinator, strategy, trained, {}, config)
        sync.shards = lambda role, size, *, adapter_only: state_dict_shards_of(trained[role].model, 24)  # type: ignore[method-assign]
        return sync, makers

    yield begin
    for actor in started:
        ray.kill(actor)


def told(maker: Any) -> tuple[list[str], int, dict[str, Tensor]]:
    return ray.get(maker.told.remote(), timeout=PATIENCE_SECONDS)  # type: ignore[no-any-return]


def has_all(sync: RunSync, arrived: dict[str, Tensor]) -> bool:
    sent = sync._trained["policy"].model.state_dict()
    return arrived.keys() == sent.keys() and all(torch.equal(sent[name], arrived[name]) for name in sent)


Run = Callable[..., tuple[RunSync, dict[str, Any]]]


@pytest.mark.slow
def test_every_chunk_comes_over_the_link_which_stays(run: Run) -> None:
    sync, makers = run(a="", b="")
    for version in (0, 1):
        sync.publish(version)
        for maker in makers.values():
            ways, links, arrived = told(maker)
            assert has_all(sync, arrived) and set(ways) == {BY_LINK} and links == 1
    assert (sync.metrics()["sync/makers"], sync.metrics()["sync/fallbacks"]) == (2, 0)


def test_the_trainer_sends_once_and_makers_forward(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Link.send
    monkeypatch.setattr(Link, "send", lambda link, shard, first: sent.append(first) or send(link, shard, first))
    sync, makers = run(**dict.fromkeys("abcdef", ""))
    for version in (0, 1):
        sync.publish(version)
        for maker in makers.values():
            ways, links, arrived = told(maker)
            assert has_all(sync, arrived) and set(ways) == {BY_LINK} and links == 1
    assert sync.report is not None and len(sent) == 2 * sync.report.num_chunks


@pytest.mark.parametrize("fault", ["dies", "hangs up"])
@pytest.mark.slow
def test_makers_behind_a_broken_link_get_the_version_from_the_store(run: Run, fault: str) -> None:
    """`a` forwards to `b` and `c`, `b` to `d` and `e`."""
    sync, makers = run(a="", b=fault, c="", d="", e="")
    sync.publish(0)
    left = {name: maker for name, maker in makers.items() if fault != "dies" or name != "b"}
    for name, maker in left.items():
        ways, _, arrived = told(maker)
        assert has_all(sync, arrived), name
        assert (BY_STORE in ways) == (name in "bde"), name
    assert sync.metrics()["sync/makers"] == len(left)
    assert sync.metrics()["sync/fallbacks"] == len(left.keys() & set("bde"))
    sync.publish(1)
    for name, maker in left.items():
        ways, _, arrived = told(maker)
        assert has_all(sync, arrived) and set(ways) == {BY_LINK}, name
    assert sync.metrics()["sync/fallbacks"] == 0


@pytest.mark.slow
def test_a_maker_whose_sender_died_while_they_were_linked_is_linked_for_the_next_version(run: Run) -> None:
    """`b` answers that it will send to `d`, and dies."""
    sync, makers = run(a="", b="dies as sender", c="", d="cannot link once")
    for version, way in enumerate((BY_STORE, BY_LINK)):
        sync.publish(version)
        ways, _, arrived = told(makers["d"])
        assert has_all(sync, arrived) and set(ways) == {way}
        assert set(told(makers["c"])[0]) == {BY_LINK}
        assert sync.metrics()["sync/makers"] == 3


@pytest.mark.slow
def test_a_maker_that_dies_in_the_middle_breaks_nobody_elses_link(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    sync, makers = run(a="", b="dies")
    sync.publish(0)
    assert sync.metrics()["sync/makers"] == 1
    ways, links, arrived = told(makers["a"])
    assert has_all(sync, arrived) and set(ways) == {BY_LINK} and links == 1
    assert "b: its process exited" in caplog.text


@pytest.mark.slow
def test_a_maker_that_dies_while_its_link_is_formed_is_left_out(run: Run) -> None:
    sync, makers = run(a="", b="dies when asked")
    sync.publish(0)
    assert sync.metrics()["sync/makers"] == 1
    assert has_all(sync, told(makers["a"])[2])


def test_a_link_that_breaks_is_named_and_the_version_comes_through_the_store(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    sync, makers = run(a="", b="hangs up")
    with caplog.at_level(logging.WARNING):
        sync.publish(0)
    assert "b receives version 0 through the object store: " in caplog.text
    assert "this maker is not linked" in caplog.text or "the link broke" in caplog.text
    assert (sync.metrics()["sync/makers"], sync.metrics()["sync/fallbacks"]) == (2, 1)
    ways, _, arrived = told(makers["b"])
    assert has_all(sync, arrived) and set(ways) == {BY_STORE}, "the version comes again as a whole"
    assert set(told(makers["a"])[0]) == {BY_LINK}
    sync.publish(1)
    ways, links, arrived = told(makers["b"])
    assert has_all(sync, arrived) and set(ways) == {BY_LINK} and links == 2
    assert sync.metrics()["sync/fallbacks"] == 0


@pytest.mark.slow
def test_a_maker_that_cannot_be_linked_is_named_once_and_served_by_the_store(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    sync, makers = run(a="", b="cannot link")
    for version in (0, 1):
        sync.publish(version)
        ways, _, arrived = told(makers["b"])
        assert has_all(sync, arrived) and set(ways) == {BY_STORE}
        assert sync.metrics()["sync/fallbacks"] == 1
    assert caplog.text.count("b receives its weights through the object store: ") == 1
    assert "no route to the trainer" in caplog.text


@pytest.mark.slow
def test_a_maker_that_refuses_the_weights_ends_the_run_as_ever(run: Run) -> None:
    sync, _ = run(a="", b="refuses")
    with pytest.raises(SyncError, match="b, weight sync: wrong scales"):
        sync.publish(0)


@pytest.mark.slow
def test_a_maker_that_starts_later_is_given_what_the_store_holds_and_then_a_link(run: Run) -> None:
    sync, _ = run(a="")
    sync.publish(0)
    late = Maker.remote()
    try:
        coordinator = sync._coordinator
        number, calls = ray.get(coordinator.register.remote("late", 1, "n", 0), timeout=PATIENCE_SECONDS)
        for call in calls:
            ray.get(late.update_experience_maker.remote(**call), timeout=PATIENCE_SECONDS)
        ways, _, arrived = told(late)
        assert has_all(sync, arrived) and set(ways) == {BY_STORE}
        ray.get(coordinator.register.remote("late", 1, "n", 0, late, number), timeout=PATIENCE_SECONDS)
        sync.publish(1)
        ways, _, arrived = told(late)
        assert has_all(sync, arrived) and set(ways) == {BY_LINK}
    finally:
        ray.kill(late)
