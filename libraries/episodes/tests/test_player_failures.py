"""Environments that fail: each way ends by the run's policy, and none takes the other episodes with it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import ClassVar

import pytest
from playing import Driven, Echo, Says, driven, play, play_one, rollouts, three_digits

from rlhf_core.errors import EpisodeError, PluginError
from rlhf_episodes import play as play_module
from rlhf_episodes.contract import Outcome
from rlhf_testing.engine import FakeEngine


def episode_of(sample, fault):
    """An environment whose `step` ends well, but for one sample, which does what `fault` does."""

    class Faulty(Echo):
        def step(self, reply):
            if self.task.sample_id == sample:
                return fault()
            return super().step(reply)

    return lambda: Faulty(turns=1)


def raises(error):
    def fault():
        raise error

    return fault


FAULTS = {
    "raises": (raises(ValueError("no luck")), "step raised ValueError: no luck"),
    "exits": (raises(SystemExit(3)), "step raised SystemExit: 3"),
    "interrupts": (raises(KeyboardInterrupt()), "step raised KeyboardInterrupt"),
    "stops iteration": (lambda: next(iter(())), "step raised StopIteration"),
    "cancels": (raises(asyncio.CancelledError()), "step raised CancelledError"),
    "gives no triple": (lambda: ("text", 1.0), r"step returned \('text', 1.0\), not \(observation, reward, done\)"),
    "gives no number": (lambda: ("text", "much", True), "the reward of step is 'much', not a number"),
    "gives no finite number": (lambda: ("text", float("nan"), True), "the reward of turn 0 is nan"),
    "gives no text": (lambda: (5, 1.0, False), "step returned 5, not text, chat messages or None"),
    "floods": (lambda: ("1" * 1_000_001, 1.0, False), "step returned 1000001 characters, more than 1000000"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_ends_the_run_names_the_sample_and_says_what_happened(fault):
    function, message = FAULTS[fault]
    with pytest.raises(EpisodeError, match=message) as raised:
        play(episode_of(1, function), samples=3)
    assert raised.value.where == "environment test, sample 1"
    assert raised.value.hint


@pytest.mark.parametrize("fault", FAULTS)
def test_or_the_episode_alone(fault):
    found = play(episode_of(1, FAULTS[fault][0]), samples=3, on_failure="drop", concurrency=1)
    assert [len(played.rows) for played in found] == [1, 0, 1]
    found = play(episode_of(1, FAULTS[fault][0]), samples=3, on_failure="zero")
    assert [(len(played.rows), played.reward) for played in found] == [(1, 1.0), (1, 0.0), (1, 1.0)]
    assert [played.rows[0].columns["environment"]["failed"] for played in found] == [0.0, 1.0, 0.0]


class AlwaysFails:
    def __init__(self, fault="constructor"):
        if fault == "constructor":
            raise OSError("no such game")

    def reset(self, task):
        raise OSError("no such game")

    def step(self, reply):
        return None, 0.0, True


@pytest.mark.parametrize("fault", ["constructor", "reset"])
def test_before_the_first_turn_there_is_nothing_to_score(fault):
    with pytest.raises(EpisodeError, match=rf"{fault} raised OSError: no such game"):
        play_one(lambda: AlwaysFails(fault))
    assert play_one(lambda: AlwaysFails(fault), on_failure="zero").rows == ()


def test_what_is_no_environment_ends_the_run_whatever_the_policy():
    class Undocumented:
        def tool(self, a: int):
            return a

    with pytest.raises(PluginError, match="docstring is missing"):
        play_one(Undocumented, on_failure="drop")


def test_an_episode_without_a_turn_is_a_failure():
    async def run(task, policy):
        return Outcome(reward=1.0)

    with pytest.raises(EpisodeError, match="before the policy's first turn"):
        play_one(driven(run))
    with pytest.raises(EpisodeError, match="before the policy's first turn"):
        play_one(Echo, context_tokens=3)
    assert play_one(Echo, context_tokens=3, on_failure="drop").rows == ()


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (None, "returned a NoneType, not an Outcome"),
        (Outcome(status="over"), "the status 'over'"),
        (Outcome(status="failed"), "reported that the episode failed"),
        (Outcome(reward=float("inf")), "the reward is inf"),
        (Outcome(turn_rewards={1: 1.0}), "rewarded turn 1 of 1"),
        (Outcome(metrics={"speed": "high"}), "the metric speed is 'high'"),
        (Outcome(metrics={"failed_fraction": 1.0}), "a metric named failed_fraction, a name that core uses itself"),
    ],
)
def test_an_outcome_is_checked(outcome, message):
    async def run(task, policy):
        await policy.turn()
        return outcome

    with pytest.raises(EpisodeError, match=message):
        play_one(driven(run))
    played = play_one(driven(run), on_failure="zero")
    assert (played.reward, played.turn_rewards, played.rows[0].columns["environment"]["failed"]) == (0.0, {}, 1.0)


def test_a_retry_plays_from_the_same_seeds_and_tells(caplog):
    tries = []

    class Fails(Echo):
        def step(self, reply):
            tries.append((self.task, reply.token_ids))
            if len(tries) < 3:
                raise OSError("again")
            return super().step(reply)

    engine = FakeEngine()
    with caplog.at_level(logging.WARNING):
        played = play_one(lambda: Fails(turns=1), engine=engine, retries=2)
    assert len(set(map(repr, tries))) == 1
    assert len(set(engine.calls)) == 1
    assert played.rows[0].columns["environment"]["failed"] == 0.0
    told = [record.message for record in caplog.records]
    assert [text.rpartition("(")[2] for text in told] == ["attempt 1 of 3)", "attempt 2 of 3)"]
    assert all("step raised OSError: again" in text for text in told)


class Hangs(Echo):
    """Hangs in one place until it is let go."""

    go: ClassVar[threading.Event]
    where: ClassVar[str]

    def _hang(self, where):
        if where == Hangs.where:
            Hangs.go.wait(60)

    def __init__(self):
        super().__init__(turns=1)
        self._hang("its constructor")

    def reset(self, task):
        self._hang("reset")
        return super().reset(task)

    def step(self, reply):
        self._hang("step")
        return super().step(reply)


@pytest.fixture
def hanging():
    Hangs.go = threading.Event()
    yield Hangs
    Hangs.go.set()


@pytest.mark.parametrize("where", ["its constructor", "reset", "step"])
@pytest.mark.slow_except("step")
def test_a_call_that_hangs_ends_at_its_deadline(hanging, where):
    hanging.where = where
    with pytest.raises(EpisodeError, match=rf"{where} did not return within 0.2 s"):
        play_one(hanging, timeout_seconds=0.2)
    found = play_one(hanging, timeout_seconds=0.2, retries=1, on_failure="zero")
    assert len(found.rows) == (where == "step")


def test_one_that_waits_does_not_hold_up_the_others(monkeypatch):
    """What the slow one waits for is set by the last turn of the others."""
    monkeypatch.setattr(play_module, "PATIENCE_SECONDS", 0.05)
    others_are_done = threading.Event()
    left = [3]

    class Slow(Echo):
        def step(self, reply):
            if self.task.sample_id == 0:
                assert others_are_done.wait(60)
            found = super().step(reply)
            if found[2] and self.task.sample_id:
                left[0] -= 1
                if not left[0]:
                    others_are_done.set()
            return found

    assert [played.reward for played in play(Slow, samples=4)] == [6.0] * 4


def test_an_answer_is_told_when_it_is_there_and_not_with_the_next():
    """The engine's third answer takes until both environments before it have seen theirs."""
    seen = threading.Semaphore(0)

    class Sees(Echo):
        def step(self, reply):
            seen.release()
            return super().step(reply)

    class Engine(FakeEngine):
        def generate(self, requests, sampling):
            for number, completion in enumerate(super().generate(requests, sampling)):
                if number == 2:
                    assert seen.acquire(timeout=60) and seen.acquire(timeout=60)
                yield completion

    assert len(play(lambda: Sees(turns=1), samples=3, engine=Engine())) == 3


def test_the_policys_time_is_not_the_environments():
    class SlowEngine(FakeEngine):
        def generate(self, requests, sampling):
            time.sleep(0.5)
            return super().generate(requests, sampling)

    async def run(task, policy):
        await policy.turn()
        await asyncio.gather(policy.fork().turn(stop=("1",)), policy.turn())  # two rounds of the engine
        return Outcome()

    assert len(play_one(driven(run), engine=SlowEngine(), timeout_seconds=0.3).rows) == 2


def test_a_coroutine_that_waits_for_ever_is_cancelled():
    ended = []

    async def run(task, policy):
        await policy.turn()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(task.sample_id)

    with pytest.raises(EpisodeError, match="run did not return within 0.2 s"):
        play_one(driven(run), timeout_seconds=0.2)
    assert ended == [0]


@pytest.mark.parametrize("fails", ["environment", "engine"])
def test_what_an_environment_closes_in_the_end_is_waited_for(fails):
    begun, closed = [], []

    async def run(task, policy):
        begun.append(task.sample_id)
        try:
            await policy.turn()
            while task.sample_id != 2 or len(begun) < 3:
                await asyncio.sleep(0.01)
            raise ValueError("no")
        finally:
            for _ in range(3):
                await asyncio.sleep(0.01)
            closed.append(task.sample_id)

    class Fails(FakeEngine):
        def generate(self, requests, sampling):
            raise OSError("no device")

    engine = Fails() if fails == "engine" else Says(three_digits)
    with pytest.raises(OSError if fails == "engine" else EpisodeError):
        play(driven(run), samples=3, engine=engine)
    assert sorted(closed) == sorted(begun)


def test_one_that_does_not_let_itself_be_cancelled_is_left_behind():
    """Whatever it does later, it has no part in the episode any more."""
    late = []

    async def run(task, policy):
        await policy.turn()
        if late:
            return Outcome(reward=1.0)
        late.append(None)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await policy.turn()
            except RuntimeError as error:
                late.append(str(error))
        return Outcome(reward=100.0)

    engine = Says(three_digits)
    played = play_one(driven(run), engine=engine, timeout_seconds=0.2, retries=1)
    assert (played.reward, len(engine.calls), late) == (1.0, 2, [None, "the episode is over"])


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), ValueError("no")])
def test_a_coroutine_may_raise_anything(error):
    async def run(task, policy):
        await policy.turn()
        if task.sample_id == 1:
            raise error
        return Outcome(reward=1.0)

    found = play(driven(run), samples=4, concurrency=1, on_failure="zero")
    assert [played.reward for played in found] == [1.0, 0.0, 1.0, 1.0]


def test_a_coroutine_that_blocks_the_loop_ends_the_run(monkeypatch):
    monkeypatch.setattr(play_module, "_PROBE_SECONDS", 0.2)
    go = threading.Event()

    async def run(task, policy):
        go.wait(60)

    try:
        with pytest.raises(EpisodeError, match="has blocked the event loop") as raised:
            play_one(driven(run), timeout_seconds=0.2, on_failure="drop")
        assert "plain function" in raised.value.hint
    finally:
        go.set()


def test_a_branch_that_is_left_alone_is_not_sampled_again(monkeypatch):
    """Its environment fails while it waits for a turn: the retry's branches have the same numbers."""
    tries = []

    async def run(task, policy):
        await policy.turn()
        branches = [policy.fork(), policy.fork()]
        turns = [asyncio.ensure_future(branch.turn(">")) for branch in branches]
        await asyncio.sleep(0)
        if not tries:
            tries.append(turns)
            raise OSError("again")
        for turn in turns:
            await turn
        return Outcome(reward=1.0)

    engine = Says(three_digits)
    played = play_one(driven(run), engine=engine, retries=1)
    assert [[request.branch for request in call] for call in engine.calls] == [[0], [0], [1, 2]]
    assert [rollout.branch for rollout in rollouts(played)] == [0, 1, 2]
    assert all(turn.cancelled() for turn in tries[0])


def test_nothing_is_left_when_the_engine_fails():
    class Fails(FakeEngine):
        def generate(self, requests, sampling):
            raise OSError("no device")

    before = threading.active_count()
    with pytest.raises(OSError, match="no device"):
        play(lambda: Driven(lambda task, policy: policy.turn()), samples=5, engine=Fails())
    assert threading.active_count() <= before


def test_a_task_of_its_own_may_exit():
    async def exits():
        raise SystemExit(1)

    async def run(task, policy):
        await policy.turn()
        if task.sample_id == 1:
            await asyncio.gather(exits(), policy.turn())
        return Outcome(reward=1.0)

    assert [played.reward for played in play(driven(run), samples=3, on_failure="zero")] == [1.0, 0.0, 1.0]
