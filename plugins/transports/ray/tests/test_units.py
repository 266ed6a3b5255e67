"""The parts of a detached run, without Ray."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from rlhf_core.config.resolve import resolve
from rlhf_core.errors import DeadlineError, InterruptedRun, RlhfError, SyncError
from rlhf_core.types import PhaseTimes
from rlhf_ray.calls import ActorLostError, explain, first_cause, is_lost
from rlhf_ray.cluster import cluster_address
from rlhf_ray.config import RayConfig
from rlhf_ray.coordinator_actor import Coordinator
from rlhf_ray.driver_files import read_status
from rlhf_ray.messages import LogLine, RolloutWork, RunOver
from rlhf_ray.sample_store import StoredGroup


def run(scenario: Callable[[Coordinator], Any], *, num_makers: int = 1, **changes: Any) -> None:
    async def play() -> None:
        options = {"prompts_per_lease": 2, "max_staleness": 0, "lease_seconds": 60.0, **changes}
        config = RayConfig.model_construct(**options)  # also with a heartbeat that would be too short for a run
        await scenario(Coordinator(config, num_makers=num_makers, num_episodes=2, prompts_per_episode=2))

    asyncio.run(play())


def made(position: int, owner: str = "m") -> StoredGroup:
    return StoredGroup(
        position=position,
        is_empty=False,
        owner=owner,
        summaries=b"",
        items=(),
        texts=(),
        token_bytes=100,
        text_bytes=10,
        keep=True,
    )


class TestCoordinator:
    def test_nothing_is_made_before_there_are_weights_nor_ahead_of_the_bound(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.register("m", 1, "n", 0)
            assert await coordinator.next_work("m", 0.01) is None
            await coordinator.publish(0)
            assert await coordinator.next_work("m", 1) == RolloutWork((0, 1), 0)
            assert await coordinator.submit("m", 0, [made(0), made(1)], PhaseTimes()) == 2
            assert await coordinator.next_work("m", 0.01) is None
            waiting = asyncio.create_task(coordinator.next_work("m", 5))
            taken = await coordinator.take(0, 1)
            assert [each.position for each in taken.groups] == [0, 1]
            await coordinator.publish(1)
            assert await waiting == RolloutWork((2, 3), 1)

        run(scenario)

    def test_a_dead_makers_prompts_go_to_another_and_count_once(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            for name in ("m", "other"):
                await coordinator.register(name, 1, "n", 0)
            await coordinator.publish(0)
            assert await coordinator.next_work("m", 1) == RolloutWork((0, 1), 0)
            waiting = asyncio.create_task(coordinator.next_work("other", 5))
            assert await coordinator.release("m") == 2
            assert await waiting == RolloutWork((0, 1), 0)
            assert await coordinator.submit("other", 0, [made(0), made(1)], PhaseTimes()) == 2
            assert await coordinator.submit("m", 0, [made(0)], PhaseTimes()) == 0
            await coordinator.take(0, 1)
            await coordinator.publish(1)
            # What a dead maker still asks for is not given to it.
            assert await coordinator.next_work("m", 0.01) is None

        run(scenario)

    def test_waits_end_and_say_what_is_missing(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            with pytest.raises(DeadlineError, match="1 makers to load their models .ready: none"):
                await coordinator.wait_for_makers(0.01)
            await coordinator.register("m", 1, "n", 3)
            await coordinator.publish(0)
            with pytest.raises(DeadlineError, match="samples of episode 0: it is not open"):
                await coordinator.take(0, 0.01)
            with pytest.raises(DeadlineError, match="evaluation: 2 parts wait"):
                await coordinator.evaluate(2, 0.01)

        run(scenario)

    def test_a_maker_is_there_once_it_has_the_newest_weights(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            assert await coordinator.register("m", 1, "n", 0, "its handle") is None
            assert await coordinator.makers() == {"m": "its handle"}
            assert await coordinator.publish(0, [{"version": 0}], {"m"}) == {}
            assert await coordinator.register("late", 1, "n", 0) == (1, [{"version": 0}])
            assert await coordinator.publish(1, [{"version": 1}], {"m"}) == {}
            assert await coordinator.register("late", 1, "n", 0, publication=1) == (2, [{"version": 1}])
            assert await coordinator.register("late", 1, "n", 0, "other", publication=2) is None
            assert await coordinator.publish(2, [{"version": 2}], {"m"}) == {"late": "other"}
            assert [maker.version for maker in (await coordinator.overview(0)).makers] == [None, 2]

        run(scenario)

    def test_the_size_of_a_lease_follows_the_number_of_makers(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            for name in ("m", "ends"):
                await coordinator.register(name, 1, "n", 0)
            await coordinator.publish(0)
            assert await coordinator.next_work("ends", 1) == RolloutWork((0,), 0)
            await coordinator.submit("ends", 0, [made(0, owner="ends")], PhaseTimes())
            await coordinator.scale(1)
            assert await coordinator.release("ends") == 1  # its samples went with it
            assert await coordinator.next_work("m", 1) == RolloutWork((0, 1), 0)

        run(scenario, num_makers=2, prompts_per_lease=None)

    def test_it_says_what_everybody_does_and_why_not(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.register("m", 1, "n", 0)
            await coordinator.alive("trainer-0", 1, "n")
            await coordinator.next_work("m", 0)
            assert (await coordinator.overview(0)).makers[0].doing == "waits: no weights have been published yet"
            await coordinator.publish(0)
            await coordinator.next_work("m", 1)
            taking = asyncio.create_task(coordinator.take(0, 5, "trainer-0"))
            await asyncio.sleep(0)
            view = await coordinator.overview(0)
            assert view.makers[0].doing == "makes 2 prompts from 0"
            assert view.trainers[0].doing == "waits: samples of episode 1 are still missing"
            await coordinator.submit("m", 0, [made(0), made(1)], PhaseTimes())
            await taking
            await coordinator.next_work("m", 0)
            view = await coordinator.overview(0)
            assert view.makers[0].doing == "waits: max_staleness: the next prompts need policy version 1"
            assert (view.makers[0].groups, view.makers[0].waiting, view.queue) == (2, 0, 0)
            assert view.trainers[0].doing == "trains on episode 1"

        run(scenario)

    def test_every_trainer_rank_gets_the_same_episode(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.register("m", 1, "n", 0)
            await coordinator.publish(0)
            await coordinator.next_work("m", 1)
            ranks = [asyncio.create_task(coordinator.take(0, 5)) for _ in range(3)]
            await asyncio.sleep(0)
            await coordinator.submit("m", 0, [made(1), made(0)], PhaseTimes(rollout_s=2.0))
            taken = await asyncio.gather(*ranks)
            assert all(each is taken[0] for each in taken)
            assert taken[0].times.rollout_s == 2.0

        run(scenario)

    def test_samples_that_went_with_their_maker_are_made_again(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            for name in ("m", "other"):
                await coordinator.register(name, 1, "n", 0)
            await coordinator.publish(0)
            await coordinator.next_work("m", 1)
            await coordinator.submit("m", 0, [made(0), made(1, owner="other")], PhaseTimes())
            waiting = asyncio.create_task(coordinator.next_work("other", 5))
            await asyncio.sleep(0)
            assert await coordinator.release("m") == 1
            assert await waiting == RolloutWork((0,), 0)
            assert await coordinator.submit("other", 0, [made(0, owner="other")], PhaseTimes()) == 1
            taken = await coordinator.take(0, 1)
            assert [each.owner for each in taken.groups] == ["other", "other"]
            assert taken.metrics["transport/token_bytes"] == 200
            assert taken.metrics["transport/text_bytes"] == 20

        run(scenario)

    def test_an_episode_of_which_samples_are_lost_is_handed_out_again(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.register("m", 1, "n", 0)
            await coordinator.publish(0)
            await coordinator.next_work("m", 1)
            await coordinator.submit("m", 0, [made(0), made(1)], PhaseTimes(rollout_s=2.0))
            await coordinator.take(0, 1)
            await coordinator.give_back(0, [1])
            with pytest.raises(DeadlineError, match="1 of 2 groups are complete"):
                await coordinator.take(0, 0.01)
            assert await coordinator.next_work("m", 1) == RolloutWork((1,), 0)
            await coordinator.submit("m", 0, [made(1, owner="again")], PhaseTimes(rollout_s=1.0))
            taken = await coordinator.take(0, 1)
            assert [each.owner for each in taken.groups] == ["m", "again"]
            assert taken.times.rollout_s == 3.0

        run(scenario)

    def test_the_end_and_events_wake_who_waits(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.register("m", 1, "n", 0)
            work = asyncio.create_task(coordinator.next_work("m", 5))
            view = asyncio.create_task(coordinator.overview(5))
            await asyncio.sleep(0)
            assert not view.done()
            await coordinator.report(LogLine("m", 20, "hello"))
            assert [line.text for line in (await view).events] == ["hello"]
            await coordinator.finish()
            assert await work == RunOver()

        run(scenario)

    def test_its_state_goes_on_elsewhere(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.register("m", 1, "n", 0)
            await coordinator.publish(0)
            await coordinator.next_work("m", 1)
            await coordinator.submit("m", 0, [made(1)], PhaseTimes())
            state = await coordinator.state()

            other = Coordinator(RayConfig(max_staleness=0), num_makers=1, num_episodes=2, prompts_per_episode=2)
            await other.register("m", 1, "n", 0)
            await other.load(state)
            await other.publish(0)
            assert await other.next_work("m", 1) == RolloutWork((0,), 0, era=1)

        run(scenario)

    def test_what_was_made_before_a_rollback_is_not_wanted_after_it(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.register("m", 1, "n", 0)
            await coordinator.publish(0)
            start = await coordinator.state()
            await coordinator.next_work("m", 1)
            await coordinator.submit("m", 0, [made(0), made(1)], PhaseTimes())
            await coordinator.take(0, 1)
            await coordinator.publish(1)
            assert await coordinator.next_work("m", 1) == RolloutWork((2, 3), 1)

            await coordinator.load(start)
            assert await coordinator.next_work("m", 0.01) is None  # its weights are not there yet
            await coordinator.publish(0)
            assert await coordinator.submit("m", 0, [made(2), made(3)], PhaseTimes()) == 0
            assert await coordinator.next_work("m", 1) == RolloutWork((0, 1), 0, era=1)
            with pytest.raises(DeadlineError, match="0 of 2 groups are complete"):
                await coordinator.take(0, 0.01)

        run(scenario)

    def test_a_maker_that_asks_for_more_while_it_works_goes_on_working(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.register("m", 1, "n", 0)
            await coordinator.publish(0)
            await coordinator.next_work("m", 1)
            assert await coordinator.next_work("m", 0.01, num_running=1) is None
            assert (await coordinator.overview(0)).makers[0].doing == "makes 2 prompts from 0"
            assert await coordinator.next_work("m", 0.01) is None
            assert "waits" in (await coordinator.overview(0)).makers[0].doing

        run(scenario)

    def test_a_silent_trainer_is_noticed(self) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            await coordinator.alive("trainer-0", 1, "n")
            assert not (await coordinator.overview(0)).silent
            await asyncio.sleep(0.05)
            await coordinator.alive("trainer-1", 1, "n")
            assert list((await coordinator.overview(0)).silent) == ["trainer-0"]

        run(scenario, heartbeat_seconds=0.04)


def test_inside_of_a_job_the_cluster_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_address(RayConfig()) is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert cluster_address(RayConfig()) == "10.0.0.1:6379"
    assert cluster_address(RayConfig(address="auto")) == "auto"


class TestFailures:
    def test_the_error_that_the_others_follow_from_comes_first(self) -> None:
        late = DeadlineError("waited")
        lost = ActorLostError("is gone")
        bug = RlhfError("ValueError: x")
        assert first_cause({"trainer-0": late, "trainer-1": lost}) is lost
        assert first_cause({"trainer-0": late, "trainer-1": bug}) is bug
        assert first_cause({"trainer-0": late}) is late
        assert isinstance(first_cause({"trainer-0": late, "trainer-1": InterruptedRun("stop")}), InterruptedRun)

    def test_an_error_names_its_actor_and_keeps_its_kind(self) -> None:
        raised = ray.exceptions.RayTaskError("work", "Traceback", SyncError("refused", where="weight sync", hint="do"))
        explained = explain("maker-1", raised.as_instanceof_cause())
        assert isinstance(explained, SyncError)
        assert (explained.where, explained.message, explained.hint) == ("maker-1, weight sync", "refused", "do")
        bug = explain("maker-1", ray.exceptions.RayTaskError("work", "Traceback", KeyError("k")).as_instanceof_cause())
        assert bug.message == "KeyError: 'k'"

    @pytest.mark.parametrize("kind", [ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError])
    def test_an_actor_that_ray_killed_for_memory_or_with_its_node_is_lost(self, kind: type[Exception]) -> None:
        error = kind("1 worker(s) were killed\nMemory usage exceeded\nTo disable worker killing, set a variable")
        assert is_lost(error)
        explained = explain("trainer-0", error)
        assert isinstance(explained, ActorLostError)
        assert (explained.where, explained.message) == ("trainer-0", "its process exited: 1 worker(s) were killed")
        in_actor = ray.exceptions.RayTaskError("fit", "Traceback", error).as_instanceof_cause()
        assert not is_lost(in_actor)

    def test_a_run_that_was_asked_to_stop_leaves_no_traceback(self, caplog: pytest.LogCaptureFixture) -> None:
        raised = ray.exceptions.RayTaskError("fit", "Traceback", InterruptedRun("stopped after episode 1"))
        assert isinstance(explain("trainer-0", raised.as_instanceof_cause()), InterruptedRun)
        assert caplog.text == ""


@pytest.mark.parametrize(
    ("transport", "algorithm", "cap"),
    [
        ({"name": "ray", "max_staleness": 4}, "ppo", 2.0),
        ({"name": "ray", "max_staleness": 4}, "grpo", 2.0),
        ({"name": "ray", "max_staleness": 4}, {"name": "ppo", "importance_cap": None}, None),
        ({"name": "ray", "max_staleness": 4}, {"name": "ppo", "importance_cap": 5.0}, 5.0),
        ({"name": "ray", "max_staleness": 4}, {"name": "grpo", "importance_token_range": [0.5, 5.0]}, None),
        ({"name": "ray", "max_staleness": 4}, {"name": "grpo", "importance_sequence_range": [0.5, 5.0]}, 2.0),
        ({"name": "ray", "max_staleness": 0}, "ppo", None),
        ("local", "ppo", None),
    ],
)
def test_samples_that_may_be_late_are_weighted_unless_the_run_says_otherwise(
    transport: Any, algorithm: Any, cap: float | None
) -> None:
    model = {"path": "builtin:tiny-digits"}
    run = {"model": model, "prompts": "sort-digits", "transport": transport, "algorithm": algorithm}
    resolved = resolve(run)
    assert resolved.algorithm.config.model_dump()["importance_cap"] == cap
    assert resolve(resolved.to_mapping()).to_mapping() == resolved.to_mapping()


def test_a_folder_without_a_detached_run_has_no_status(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    with pytest.raises(RlhfError, match="the folder does not exist"):
        read_status(tmp_path / "nowhere")


def test_the_port_at_which_ranks_meet_belongs_to_its_store_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else can take it between the choice of the port and the start of the process group."""
    from torch.distributed import TCPStore

    from rlhf_ray import trainer_actor

    monkeypatch.setattr(trainer_actor, "node_address", lambda: "127.0.0.1")
    trainer = object.__new__(trainer_actor.TrainerActor)
    trainer._node, trainer._config = "n", RayConfig()
    assert trainer.place(False) == ("n", "127.0.0.1", None)
    node, address, port = trainer.place(True)
    assert (node, address) == ("n", "127.0.0.1") and port is not None
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port))
    TCPStore(address, port, None, is_master=False).set("rank", "1")
