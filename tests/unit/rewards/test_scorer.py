"""One policy for every reward: batches, concurrency, deadlines, retries, failures."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import DEFAULT, Mock

import faulty_rewards as faulty
import pytest
from running import PATIENCE_SECONDS

from rlhf_core.config.sections import RewardCallOptions
from rlhf_core.errors import RewardError
from rlhf_core.rewards import scorer as scoring
from rlhf_core.rewards.scorer import RewardScorer, RewardSpec

OWN = {"r": 0.0}


def counts(scorer):
    return {key.rpartition("/")[2]: value for key, value in scorer.take_metrics().items()}


def test_several_rewards_by_name_in_order(score, rollouts):
    scores, scorer = score({"a": faulty.right, "b": lambda r: [0.5] * len(r), "c": faulty.right_async}, rollouts)
    assert scores == [{"a": float(i), "b": 0.5, "c": float(i)} for i in range(4)]
    metrics = scorer.take_metrics()
    assert {key for key in metrics if not key.endswith("seconds")} == {f"reward_calls/{n}/calls" for n in "abc"}
    assert counts(scorer)["calls"] == 0


def test_what_a_reward_counts_itself_is_among_its_counts(score, rollouts):
    class Counting:
        asked = 0

        def __call__(self, batch):
            self.asked += len(batch)
            return faulty.right(batch)

        def take_counts(self):
            taken, self.asked = self.asked, 0
            return {"asked": taken, "spent": 0}

    _, scorer = score(Counting(), rollouts)
    assert {name: value for name, value in counts(scorer).items() if name != "seconds"} == {"calls": 1, "asked": 4}
    assert "asked" not in counts(scorer)


def test_no_rollouts(score):
    assert score(faulty.right, [])[0] == []


def test_batches(score, rollouts):
    sizes = []

    def reward(batch):
        sizes.append(len(batch))
        return faulty.right(batch)

    scores, _ = score(reward, rollouts, batch_size=3)
    assert [row["r"] for row in scores] == [0, 1, 2, 3]
    assert sizes == [3, 1]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_concurrent_calls_meet_and_no_more_than_asked_for(score, rollouts, kind):
    # Two calls that each wait for the other: with less concurrency they would never end.
    barrier, running, most = threading.Barrier(2), 0, 0
    lock = threading.Lock()

    def enter(change):
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)

    def reward(batch):
        enter(1)
        barrier.wait(PATIENCE_SECONDS)
        enter(-1)
        return faulty.right(batch)

    async def reward_async(batch):
        return await asyncio.to_thread(reward, batch)

    scores, _ = score(reward if kind == "sync" else reward_async, rollouts, batch_size=1, concurrency=2)
    assert [row["r"] for row in scores] == [0, 1, 2, 3]
    assert most == 2


def test_submit_does_not_wait(rollouts):
    go = threading.Event()

    def reward(batch):
        go.wait(PATIENCE_SECONDS)
        return faulty.right(batch)

    scorer = RewardScorer([RewardSpec(name="r", function=reward, call_options=RewardCallOptions())])
    futures = [scorer.submit(rollouts[:2]), scorer.submit(rollouts[2:])]
    assert not any(future.done() for future in futures)
    go.set()
    assert [[row["r"] for row in future.result(20)] for future in futures] == [[0, 1], [2, 3]]
    scorer.close()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (faulty.raises, r"raised KeyError: 'no such model' \(\S*faulty_rewards.py, line \d+\), at sample 0"),
        (faulty.exits, r"raised SystemExit: 3 \(.*\), at sample 0"),
        (faulty.wrong_count, r"returned 1 values for 4 samples, at sample 0"),
        (faulty.not_numbers, r"returned an invalid score: 'good' \(str\) is not a number, at sample 0"),
        (lambda r: None, r"returned None instead of 4 numbers"),
        (lambda r: [0.0, 1.0, float("nan"), 1.0], r"returned an invalid score: nan is not finite, at sample 2"),
        (lambda r: [0.0, float("inf"), 1.0, 1.0], r"returned an invalid score: inf is not finite, at sample 1"),
        (lambda r: [0.0, None, 1.0, 1.0], r"returned an invalid score: None is not a number, at sample 1"),
    ],
)
class TestFaulty:
    def test_fail_names_plugin_sample_and_value(self, score, rollouts, reward, message):
        with pytest.raises(RewardError, match=f"dist 1.0: {message}") as caught:
            score(reward, rollouts)
        assert caught.value.where == 'reward "r"'

    def test_zero_and_drop_concern_the_failed_samples_only(self, score, rollouts, reward, message):
        zeroed, scorer = score(reward, rollouts, on_failure="zero")
        metrics = counts(scorer)
        dropped, _ = score(reward, rollouts, on_failure="drop")
        bad = [index for index, row in enumerate(dropped) if row is None]
        assert bad and metrics["zeroed"] == len(bad)
        assert all(zeroed[index] == OWN for index in bad)
        assert all(zeroed[index] == dropped[index] for index in range(4) if index not in bad)
        if "at sample 2" in message or "at sample 1" in message:
            assert len(bad) == 1


def test_the_cause_is_kept(score, rollouts):
    with pytest.raises(RewardError) as caught:
        score(faulty.raises, rollouts)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_failed_batch_leaves_the_others_alone(score, rollouts):
    def reward(batch):
        if batch[0].completion == "2":
            raise OSError
        return faulty.right(batch)

    scores, _ = score(reward, rollouts, batch_size=1, on_failure="drop")
    assert [row and row["r"] for row in scores] == [0, 1, None, 3]


def test_one_reward_that_drops_drops_the_sample(score, rollouts):
    scores, _ = score({"a": faulty.right, "b": lambda r: [1, None, 1, 1]}, rollouts, on_failure="drop")
    assert [row is None for row in scores] == [False, True, False, False]


def test_retries_until_it_works(score, rollouts, monkeypatch):
    monkeypatch.setattr("rlhf_core.rewards.runner._FIRST_WAIT_SECONDS", 0.0)
    answers = iter([OSError("busy"), [1.0, float("nan"), 1.0, 1.0], [1.0] * 4])

    def reward(batch):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    scores, scorer = score(reward, rollouts, retries=2)
    assert scores == [{"r": 1.0}] * 4
    assert {key: value for key, value in counts(scorer).items() if key != "seconds"} == {
        "calls": 3,
        "failures": 2,
        "retries": 2,
    }


def test_retries_end(score, rollouts, monkeypatch):
    monkeypatch.setattr("rlhf_core.rewards.runner._FIRST_WAIT_SECONDS", 0.0)
    with pytest.raises(RewardError, match="no such model"):
        score(faulty.raises, rollouts, retries=3)


@pytest.mark.parametrize("kind", ["sync", "async", "handed on"])
def test_a_deadline_ends_a_call_that_hangs(score, rollouts, kind):
    release = threading.Event()

    def sync(batch):
        if batch[0].completion == "0":
            release.wait()
        return faulty.right(batch)

    async def asynchronous(batch):
        if batch[0].completion == "0":
            await asyncio.Event().wait()
        return faulty.right(batch)

    reward = {"sync": sync, "async": asynchronous, "handed on": lambda batch: asynchronous(batch)}[kind]
    scores, scorer = score(reward, rollouts, batch_size=2, timeout_seconds=0.3, on_failure="drop")
    assert [row and row["r"] for row in scores] == [None, None, 2, 3]
    with pytest.raises(RewardError, match=r"no answer within 0.3 s, at sample 0"):
        score(reward, rollouts, timeout_seconds=0.3)
    release.set()
    assert counts(scorer)["failures"] == 1


def test_a_coroutine_that_blocks_its_loop_is_left_behind(score, rollouts):
    release = threading.Event()

    async def reward(batch):
        if batch[0].completion == "0":
            release.wait()
        return faulty.right(batch)

    scores, _ = score(reward, rollouts, batch_size=2, timeout_seconds=0.3, on_failure="drop")
    release.set()
    assert [row and row["r"] for row in scores] == [None, None, 2, 3]


def test_an_own_timeout_error_is_an_error_of_the_reward(score, rollouts):
    async def reward(batch):
        raise TimeoutError("the judge is slow")

    with pytest.raises(RewardError, match="raised TimeoutError: the judge is slow"):
        score(reward, rollouts)


@pytest.mark.parametrize("is_async", [False, True])
def test_hung_threads_are_bounded(score, monkeypatch, rollouts, is_async):
    monkeypatch.setattr("rlhf_core.rewards.runner.MAX_ABANDONED", 2)
    monkeypatch.setattr("rlhf_core.rewards.threads._PROBE_SECONDS", 0.05)
    release = threading.Event()
    calls = []

    def reward(batch):
        calls.append(batch)
        release.wait()

    async def blocks_its_loop(batch):
        reward(batch)

    scores, _ = score(
        blocks_its_loop if is_async else reward, rollouts, batch_size=1, timeout_seconds=0.1, on_failure="zero"
    )
    release.set()
    assert scores == [OWN] * 4
    assert len(calls) == 2


def test_close_ends_what_waits(rollouts):
    entered, release = threading.Event(), threading.Event()

    def reward(batch):
        entered.set()
        release.wait(PATIENCE_SECONDS)
        return faulty.right(batch)

    scorer = RewardScorer([RewardSpec(name="r", function=reward, call_options=RewardCallOptions(batch_size=1))])
    future = scorer.submit(rollouts)
    assert entered.wait(PATIENCE_SECONDS)
    threading.Timer(0.2, release.set).start()
    scorer.close()
    with pytest.raises(RewardError, match="the run is ending"):
        future.result(20)
    with pytest.raises(RewardError, match="the run is ending"):
        scorer.submit(rollouts).result(20)


def test_close_ends_a_coroutine_that_runs(rollouts):
    entered = threading.Event()

    async def reward(batch):
        entered.set()
        await asyncio.Event().wait()

    scorer = RewardScorer([RewardSpec(name="r", function=reward, call_options=RewardCallOptions())])
    future = scorer.submit(rollouts)
    assert entered.wait(PATIENCE_SECONDS)
    scorer.close()
    with pytest.raises(RewardError):
        future.result(20)


class Holds:
    """A reward that holds something open."""

    def __init__(self):
        self.closed = 0

    def __call__(self, rollouts):
        return faulty.right(rollouts)

    def close(self):
        self.closed += 1


class HoldsAsync(Holds):
    async def aclose(self):
        await asyncio.sleep(0)
        self.closed += 10


@pytest.mark.parametrize(("kind", "closed"), [(Holds, 1), (HoldsAsync, 10)])
def test_a_reward_that_holds_something_is_told_to_close_it(score, rollouts, kind, closed):
    reward = kind()
    _, scorer = score(reward, rollouts)
    assert reward.closed == 0
    scorer.close()
    scorer.close()
    assert reward.closed == closed


def test_makers_that_begin_together_share_one_loop(rollouts, monkeypatch):
    monkeypatch.setattr(scoring, "LoopThread", slow := Mock(wraps=scoring.LoopThread))
    slow.side_effect = lambda name: time.sleep(0.05) or DEFAULT
    scorer = RewardScorer([RewardSpec(name="r", function=faulty.right, call_options=RewardCallOptions())])
    with closing(scorer), ThreadPoolExecutor(4) as pool:
        assert all(each == scorer.score(rollouts) for each in pool.map(scorer.score, [rollouts] * 4))
    assert slow.call_count == 1
    with pytest.raises(RewardError, match="the run is ending"):
        scorer.submit(rollouts)
