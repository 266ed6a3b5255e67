"""Rewards in processes of their own: what ends them, and that the run goes on."""

import os
from pathlib import Path

import faulty_rewards as faulty
import pytest

from rlhf_containment.processes.asked import BadAnswer
from rlhf_containment.rewards.messages import failed, read_answer, scored
from rlhf_core.errors import RewardError
from rlhf_core.rewards.values import BadScore, RewardFault, TurnScores

PATH = Path(faulty.__file__)
MEGABYTE = 10**6


@pytest.fixture
def isolated(score, rollouts):
    def run(name, rollouts=rollouts, **policy):
        recipe = faulty.Recipe(str(PATH), name)
        return score({"r": None}, rollouts, recipe=recipe, isolate=True, **({"timeout_seconds": 60.0} | policy))

    return run


def values(scores):
    return [row and row["r"] for row in scores]


@pytest.mark.parametrize("name", ["right", "right_async"])
def test_it_scores(isolated, name):
    assert values(isolated(name)[0]) == [0, 1, 2, 3]


def test_one_process_is_kept_and_is_not_ours(isolated, rollouts):
    scores, scorer = isolated("process_id", batch_size=2)
    scores += scorer.score(rollouts)
    pids = set(values(scores))
    assert len(pids) == 1
    pid = int(pids.pop())
    assert pid != os.getpid()
    scorer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("segfaults", "crashed: its process was ended by SIGSEGV"),
        ("dies", "ended its process with exit code 7"),
        ("raises", r"raised KeyError: 'no such model' \(\S*faulty_rewards.py, line \d+\)"),
        ("wrong_count", "returned 1 values for 4 samples"),
        ("not_numbers", r"returned an invalid score: 'good' \(str\) is not a number"),
        ("missing", 'not define a function "missing"'),
    ],
)
def test_what_fails_is_said(isolated, name, message):
    with pytest.raises(RewardError, match=message):
        isolated(name)


def test_what_it_writes_is_never_unpickled(isolated, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_TEST_TOUCHED", str(tmp_path / "touched"))
    with pytest.raises(RewardError, match="wrote something that is not an answer: it is not JSON"):
        isolated("writes_a_pickle_in_place_of_an_answer")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "answer", [b"", b"[", b"[" * 100_000, b"1", b'["scores", 1.0]', b'["scores", [1.0]]', b'["scores", [1.0, []]]x']
)
def test_an_answer_of_another_form_is_named(answer):
    with pytest.raises(BadAnswer):
        read_answer(answer, 2)


def test_an_answer_comes_over_as_it_is():
    scores = [0.1, BadScore("'good' (str) is not a number")]
    assert read_answer(scored(scores), 2) == scores
    with pytest.raises(RewardFault) as raised:
        read_answer(failed("x" * 20_000), 2)
    assert str(raised.value) == "x" * 10_000


def test_numbers_of_turns_come_over_as_json():
    given = [TurnScores({0: 0.25, 3: -1.0}), 1.0, BadScore("why")]
    found = read_answer(scored(given), 3)
    assert found == given and found[0].turns == {0: 0.25, 3: -1.0}
    for hostile in (b'["scores", [[1]]]', b'["scores", [[[1, 2, 3]]]]', b'["scores", [[[[], 1]]]]'):
        with pytest.raises(BadAnswer):
            read_answer(hostile, 1)


def test_the_run_survives_a_crash(isolated):
    assert values(isolated("segfaults_on_two", batch_size=1, on_failure="zero")[0]) == [0, 1, 0, 3]


@pytest.mark.parametrize(
    ("name", "reason"), [("hangs_on_two", "gave no answer within"), ("segfaults_on_two", "crashed: its process")]
)
@pytest.mark.slow_except("hangs_on_two-gave no answer within")
def test_one_answer_that_hangs_or_crashes_fails_alone(isolated, caplog, name, reason):
    scores, scorer = isolated(name, timeout_seconds=1.0, on_failure="zero")
    assert values(scores) == [0, 1, 0, 3]
    assert scorer.take_metrics()["reward_calls/r/zeroed"] == 1
    (warning,) = caplog.messages
    assert warning.startswith('reward "r": dist 1.0: ' + reason)
    assert "scoring this answer alone after a call with 4 answers failed" in warning
    assert warning.endswith("sample 2 counts 0")


def test_the_answer_that_ends_the_run_is_named(isolated):
    with pytest.raises(RewardError, match="crashed.*at sample 2") as caught:
        isolated("segfaults_on_two")
    assert "on_failure: zero" in str(caught.value)


@pytest.mark.slow
def test_answers_that_fail_alone_are_asked_once_of_each_state(isolated):
    name, rollouts = "hangs_or_crashes_after_a_look", [faulty.make_rollout(index) for index in range(7)]
    scores, scorer = isolated(name, timeout_seconds=2.0, on_failure="drop", rollouts=rollouts)
    assert values(scores) == [0, None, 2, 3, None, 5, 6]
    assert scorer.take_metrics()["reward_calls/r/dropped"] == 2


@pytest.mark.parametrize("name", ["hangs", "hangs_with_the_lock_held"])
@pytest.mark.slow
def test_one_that_hangs_is_ended(isolated, name):
    assert isolated(name, timeout_seconds=0.5, on_failure="drop")[0] == [None] * 4
    line = rf"faulty_rewards.py:\d+ in {name}, at sample 0"
    with pytest.raises(RewardError, match=rf"no answer within 0.5 s, at (\S+ in \S+, called from )*\S*{line}"):
        isolated(name, timeout_seconds=0.5)


@pytest.mark.slow
def test_one_that_allocates_without_end_is_ended(isolated):
    with pytest.raises(RewardError, match="more than its limit of 500,000,000"):
        isolated("allocates_without_end", memory_limit_bytes=500 * MEGABYTE)


@pytest.mark.slow
def test_one_that_leaks_is_replaced(isolated):
    # Each call leaves 300 MB behind and answers how often this process was called: two calls are too many.
    scores, _ = isolated("leaks", batch_size=1, memory_limit_bytes=500 * MEGABYTE, retries=1)
    assert set(values(scores)) <= {1, 2}


def test_what_cannot_cross_over_is_refused_at_once(score, rollouts):
    with pytest.raises(RewardError, match="cannot be run in its own process"):
        score(lambda batch: [1.0], rollouts, isolate=True)
