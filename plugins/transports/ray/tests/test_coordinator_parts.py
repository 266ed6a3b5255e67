"""What the coordinator keeps: actors and what they do, parts of an evaluation, what rewards keep."""

from __future__ import annotations

import pytest

from rlhf_core.rollout.evaluate import EvaluationRow
from rlhf_ray.coordinator_parts import ActorRegistry, EvaluationJobs, MakerStates
from rlhf_ray.messages import EvaluationWork, RolloutWork


class TestEvaluationJobs:
    def test_every_prompt_is_answered_once_though_a_maker_dies(self) -> None:
        jobs = EvaluationJobs()
        jobs.open(10, 4, version=2)
        works = [jobs.take("a"), jobs.take("b"), jobs.take("a")]
        assert works == [EvaluationWork(0, 4, 2), EvaluationWork(4, 8, 2), EvaluationWork(8, 10, 2)]
        assert jobs.take("b") is None
        jobs.done(works[1], self.rows(4))
        jobs.release("a")
        assert not jobs.complete
        again = [jobs.take("b"), jobs.take("b")]
        assert again == [works[0], works[2]]
        for work in again:
            assert work is not None
            jobs.done(work, self.rows(work.start))
        jobs.done(EvaluationWork(0, 4, 2), self.rows(99))
        assert jobs.complete
        assert [row.num_tokens for row in jobs.rows()] == [0, 4, 8]

    def rows(self, number: int) -> list[EvaluationRow]:
        return [EvaluationRow({"exact": 1.0}, number, False)]


class TestActorRegistry:
    def test_silence_and_long_work_are_noticed(self) -> None:
        now = [0.0]
        registry = ActorRegistry(heartbeat_seconds=10, work_seconds=100, clock=lambda: now[0])
        registry.register("a", 1, "n")
        registry.register("b", 2, "n")
        registry.set_working("a", str(RolloutWork((4, 5), 0)))
        now[0] = 9
        registry.record_heartbeat("a")
        now[0] = 15
        assert registry.stuck() == {"b": "sent no heartbeat for 15 s"}
        now[0] = 101
        registry.record_heartbeat("a")
        assert registry.stuck()["a"] == "has been busy for 101 s (makes 2 prompts from 4)"
        registry.forget("a")
        assert list(registry) == ["b"]

    def test_time_is_counted_by_what_a_maker_waited_for(self) -> None:
        now = [0.0]
        registry = ActorRegistry(heartbeat_seconds=10, work_seconds=100, clock=lambda: now[0])
        registry.register("a", 1, "n")
        registry.set_waiting("a", "max_staleness: the next prompts need policy version 1")
        now[0] = 2
        registry.set_waiting("a", "a complete episode waits for the trainers")
        now[0] = 5
        registry.set_waiting("a", "max_staleness: the next prompts need policy version 2")
        now[0] = 6
        registry.set_working("a", "makes")
        now[0] = 24
        registry.add_groups("a", 3)
        (row,) = registry.rows({"a": 2})
        assert (row.busy, row.groups, row.waiting) == (0.75, 3, 2)

    def test_idle_fraction(self) -> None:
        now = [0.0]
        registry = ActorRegistry(heartbeat_seconds=10, work_seconds=100, clock=lambda: now[0])
        registry.register("a", 1, "n")
        now[0] = 3
        registry.set_working("a", "makes")
        now[0] = 4
        assert registry.take_idle_fraction() == pytest.approx(0.75)
        now[0] = 8
        assert registry.take_idle_fraction() == 0
        registry.set_waiting("a", "nothing to do")
        now[0] = 10
        assert registry.take_idle_fraction() == 1

    def test_what_goes_on_began_when_it_began(self) -> None:
        now = [0.0]
        registry = ActorRegistry(heartbeat_seconds=10, clock=lambda: now[0])
        registry.register("a")
        registry.set_waiting("a", "no weights")
        now[0] = 2
        registry.set_waiting("a", "no prompts")
        assert (registry.rows()[0].doing, registry.rows()[0].for_s) == ("waits: no prompts", 2.0)
        registry.set_working("a", "trains")
        now[0] = 3
        assert (registry.rows()[0].doing, registry.rows()[0].for_s) == ("trains", 1.0)


class TestMakerStates:
    def test_makers_that_come_after_a_resume_go_on_from_what_was_saved(self) -> None:
        states = MakerStates()
        assert states.of(3) == {}
        states.keep(1, {"n": 1})
        states.keep(0, {"n": 0})
        assert states.all() == [{"n": 0}, {"n": 1}]
        assert states.of(3) == {}  # nothing was resumed: it starts anew
        states.restore(states.all(), 1)
        assert states.all() == [{"n": 0}]
        assert states.of(3) == {"n": 1}
