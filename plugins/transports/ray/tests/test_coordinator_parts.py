"""What the coordinator keeps: actors and what they do, parts of an evaluation, what rewards keep."""

from __future__ import annotations

import pytest

from rlhf_core.rollout.evaluate import EvaluationRow
from rlhf_ray.coordinator_parts import EvaluationJobs, MakerRegistry, MakerStates, TrainerRegistry
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


class TestMakerRegistry:
    def test_silence_and_long_work_are_noticed(self) -> None:
        now = [0.0]
        registry = MakerRegistry(heartbeat_seconds=10, work_seconds=100, clock=lambda: now[0])
        registry.register("a", 1, "n")
        registry.register("b", 2, "n")
        registry.begins("a", RolloutWork((4, 5), 0))
        now[0] = 9
        registry.seen("a")
        now[0] = 15
        assert registry.stuck() == {"b": "gave no sign of life for 15 s"}
        now[0] = 101
        registry.seen("a")
        assert registry.stuck()["a"] == "makes 2 prompts from 4 since 101 s"
        registry.forget("a")
        assert registry.registered == {"b"}

    def test_time_is_counted_by_what_a_maker_waited_for(self) -> None:
        now = [0.0]
        registry = MakerRegistry(heartbeat_seconds=10, work_seconds=100, clock=lambda: now[0])
        registry.register("a", 1, "n")
        registry.waits("a", "max_staleness: the next prompts need policy version 1")
        now[0] = 2
        registry.waits("a", "a complete episode waits for the trainers")
        now[0] = 5
        registry.waits("a", "max_staleness: the next prompts need policy version 2")
        now[0] = 6
        registry.begins("a", RolloutWork((0,), 0))
        now[0] = 24
        registry.made("a", 3)
        (row,) = registry.describe({"a": 2}, {"a": 1})
        assert (row["busy"], row["groups"], row["waiting"], row["making"]) == (0.75, 3, 2, 1)
        registry.leave("later")
        registry.register("later", 2, "n")
        assert registry.is_leaving("later")

    def test_idle_fraction(self) -> None:
        now = [0.0]
        registry = MakerRegistry(heartbeat_seconds=10, work_seconds=100, clock=lambda: now[0])
        registry.register("a", 1, "n")
        now[0] = 3
        registry.begins("a", RolloutWork((0,), 0))
        now[0] = 4
        assert registry.take_idle_fraction() == pytest.approx(0.75)
        now[0] = 8
        assert registry.take_idle_fraction() == 0
        registry.begins("a", None)
        now[0] = 10
        assert registry.take_idle_fraction() == 1


class TestTrainerRegistry:
    def test_waiting_is_not_work(self) -> None:
        now = [0.0]
        registry = TrainerRegistry(heartbeat_seconds=10, clock=lambda: now[0])
        registry.seen("trainer-0")
        now[0] = 1
        registry.waits("trainer-0", "samples")
        now[0] = 4
        registry.works("trainer-0", "trains")
        now[0] = 12
        assert registry.describe()["trainer-0"] == {
            "doing": "trains",
            "for_s": 8.0,
            "busy": 0.75,
        }
        now[0] = 15
        assert registry.silent() == {"trainer-0": 11.0}


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
