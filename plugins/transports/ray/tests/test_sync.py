"""The sending end of a weight sync, against makers that only write down what they are told."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import ray.cloudpickle
import torch
from running import PATIENCE_SECONDS
from torch import nn

from rlhf_core.errors import DeadlineError, SyncError
from rlhf_core.strategy import TrainedModel
from rlhf_ray.calls import ActorLostError, NamedActors
from rlhf_ray.config import RayConfig
from rlhf_ray.coordinator_actor import Coordinator
from rlhf_ray.ray_sync import MakerSync, RunSync
from rlhf_ray.wire import unpack
from rlhf_strategies import state_dict_shards_of

pytestmark = pytest.mark.usefixtures("local_ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module


class OneProcess:
    """What a sync asks of a strategy."""

    is_main = True
    state_dict_shards = staticmethod(state_dict_shards_of)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def run_on_main(self, action: Callable[[], None]) -> None:
        action()


@ray.remote(num_cpus=0)
class Maker:
    def __init__(self, behaviour: str = "takes") -> None:
        self.behaviour = behaviour
        self.calls: list[dict[str, Any]] = []

    def update_experience_maker(self, **call: Any) -> None:
        self.calls.append(call)
        if self.behaviour == "dies" and "new_actor_state_dict" in call:
            ray.actor.exit_actor()
        if self.behaviour == "refuses" and call.get("chunk_end"):
            raise SyncError("wrong shape", where="weight sync", hint="same model")
        if self.behaviour == "sleeps":
            time.sleep(PATIENCE_SECONDS)

    def told(self) -> list[Any]:
        """Start, names of each chunk, end."""
        weights = [call.get("new_actor_state_dict") for call in self.calls]
        return [
            "start" if call.get("chunk_start") else "end" if call.get("chunk_end") else sorted(unpack(chunk))
            for call, chunk in zip(self.calls, weights, strict=True)
        ]


@pytest.fixture
def start() -> Iterator[Callable[..., dict[str, Any]]]:
    """start(name=behaviour, …) -> handles by name."""
    started: list[Any] = []

    def begin(**behaviours: str) -> dict[str, Any]:
        made = {name: Maker.remote(behaviour) for name, behaviour in behaviours.items()}
        started.extend(made.values())
        return made

    yield begin
    for actor in started:
        ray.kill(actor)


def sync_to(makers: dict[str, Any], timeout_seconds: float = PATIENCE_SECONDS) -> MakerSync:
    known = NamedActors([], timeout_seconds=1)
    known.add_handles(makers)
    trained = {"policy": TrainedModel(nn.Linear(2, 2), None, None)}  # type: ignore[arg-type]
    strategy: Any = OneProcess()
    return MakerSync(strategy, trained, {}, known, sender="t", timeout_seconds=timeout_seconds)


def send(sync: MakerSync, makers: dict[str, Any]) -> None:
    sync.send(3, makers, adapter_only=False, max_shard_bytes=16)


def told(maker: Any) -> list[Any]:
    return ray.get(maker.told.remote(), timeout=PATIENCE_SECONDS)  # type: ignore[no-any-return]


def test_parts_come_in_order_and_then_the_end(start: Callable[..., dict[str, Any]]) -> None:
    makers = start(a="takes", b="takes")
    sync = sync_to(makers)
    send(sync, makers)
    assert [told(maker) for maker in makers.values()] == [["start", ["weight"], ["bias"], "end"]] * 2
    assert sync.report is not None
    assert (sync.report.num_makers, sync.report.num_chunks, sync.report.num_bytes) == (2, 2, 24)


def test_one_that_refuses_it_is_named(start: Callable[..., dict[str, Any]]) -> None:
    makers = start(a="takes", b="refuses")
    with pytest.raises(SyncError, match="b, weight sync: wrong shape"):
        send(sync_to(makers), makers)


def test_one_that_dies_is_left_out_and_without_any_it_fails(start: Callable[..., dict[str, Any]]) -> None:
    makers = start(a="takes", b="dies")
    sync = sync_to(makers)
    send(sync, makers)
    assert told(makers["a"])[-1] == "end"
    assert sync.report is not None and sync.report.num_makers == 1
    makers = start(c="dies")
    with pytest.raises(ActorLostError, match="c: its process exited"):
        send(sync_to(makers), makers)


def test_one_that_does_not_answer_is_named_in_time(start: Callable[..., dict[str, Any]]) -> None:
    makers = start(a="sleeps")
    with pytest.raises(DeadlineError, match="0.2 s for actor 'a' to take policy version 3"):
        send(sync_to(makers, timeout_seconds=0.2), makers)


class Later(Coordinator):
    """One of its makers comes while the first version is sent, another after that."""

    async def publish(self, version: int, *arguments: Any) -> dict[str, Any]:
        if version == 0:
            await self.register("b", 1, "n", 0, self.late)
        return await super().publish(version, *arguments)

    async def will_come(self, late: list[Any]) -> None:
        (self.late,) = late


@pytest.mark.slow
def test_in_a_run_who_comes_late_gets_it_too(start: Callable[..., dict[str, Any]]) -> None:
    makers = start(a="dies", b="takes", c="takes")
    settings = RayConfig(prompts_per_lease=1, max_staleness=0, lease_seconds=60, heartbeat_seconds=60)
    coordinator: Any = (
        ray.remote(Later).options(num_cpus=0).remote(settings, num_makers=1, num_episodes=1, prompts_per_episode=1)
    )
    try:
        ray.get(coordinator.will_come.remote([makers["b"]]), timeout=PATIENCE_SECONDS)
        ray.get(coordinator.register.remote("a", 1, "n", 0, makers["a"]), timeout=PATIENCE_SECONDS)
        strategy: Any = OneProcess()
        trained = {"policy": TrainedModel(nn.Linear(2, 2), None, None)}  # type: ignore[arg-type]
        sync = RunSync(coordinator, strategy, trained, {}, RayConfig())
        sync.publish(0)  # its only maker dies: the run starts another in its place
        assert sync.metrics()["sync/makers"] == 0
        assert told(makers["b"]) == ["start", ["bias", "weight"], "end"]
        number, calls = ray.get(coordinator.register.remote("c", 1, "n", 0), timeout=PATIENCE_SECONDS)
        for call in calls:
            ray.get(makers["c"].update_experience_maker.remote(**call), timeout=PATIENCE_SECONDS)
        assert told(makers["c"]) == told(makers["b"])
        joined = coordinator.register.remote("c", 1, "n", 0, makers["c"], number)
        assert ray.get(joined, timeout=PATIENCE_SECONDS) is None
    finally:
        ray.kill(coordinator)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writ")  # as `set_up_process` has it in an actor
def test_the_same_bytes_arrive(start: Callable[..., dict[str, Any]]) -> None:
    makers = start(a="takes")
    sync = sync_to(makers)
    send(sync, makers)
    calls = ray.get(makers["a"].__ray_call__.remote(lambda self: self.calls), timeout=PATIENCE_SECONDS)
    arrived = {name: value for call in calls for name, value in unpack(call.get("new_actor_state_dict") or {}).items()}
    sent = sync._trained["policy"].model.state_dict()
    assert all(torch.equal(sent[name], arrived[name]) for name in sent)
