"""The on-disk cache: what is one answer, and whose score is kept."""

import dataclasses
import itertools
import sqlite3

import faulty_rewards as faulty
import pytest
from faulty_rewards import make_rollout
from hypothesis import given
from hypothesis import strategies as st

from rlhf_containment.rewards.cache import ScoreCache, cache_key
from rlhf_core.config.sections import RewardCallOptions
from rlhf_core.errors import RewardError
from rlhf_core.rewards import RewardScorer, RewardSpec
from rlhf_core.types import Turn


def spec(**changes):
    return RewardSpec(**({"name": "r", "function": faulty.right, "call_options": RewardCallOptions()} | changes))


SPEC = spec()


def counting():
    numbers = itertools.count(1)
    return lambda batch: [float(next(numbers)) for _ in batch]


def values(scores):
    return [row and row["r"] for row in scores]


def test_a_non_deterministic_reward_keeps_its_first_answer(score, rollouts):
    reward = counting()
    first, _ = score(reward, rollouts, cache=True)
    again, scorer = score(reward, rollouts, cache=True)
    assert values(first) == values(again) == [1, 2, 3, 4]
    assert scorer.take_metrics()["reward_calls/r/cache_hits"] == 4
    assert values(score(reward, rollouts)[0]) == [5, 6, 7, 8]


def test_numbers_of_turns_are_remembered_as_such(score):
    turn = Turn(role="policy", text="x", token_ids=(1,), logprobs=(0.0,))
    asked = [dataclasses.replace(make_rollout(index, text), turns=(turn, turn)) for index, text in enumerate("ab")]
    first, _ = score(lambda batch: [{0: 0.5, 1: 2.0}, 3.0], asked, cache=True)
    again, _ = score(faulty.raises, asked, cache=True)
    for found in (first, again):
        turns, number = values(found)
        assert turns.turns == {0: 0.5, 1: 2.0} and (turns, number) == (2.5, 3.0)
    with pytest.raises(RewardError, match="a number for turn 2, counted from 0, of 2, at sample 1"):
        score(lambda batch: [1.0, {2: 1.0}], asked)


def test_equal_answers_in_one_batch_are_asked_about_once(score):
    same = [make_rollout(index, "x", policy_version=index, logprobs=(-float(index),)) for index in range(3)]
    assert values(score(counting(), [*same, make_rollout(9, "y")], cache=True)[0]) == [1, 1, 1, 2]


def test_a_new_version_or_other_options_are_asked_again(score, rollouts):
    reward = counting()
    score(reward, rollouts, cache=True)
    assert values(score(reward, rollouts, cache=True, plugin="dist 1.1")[0]) == [5, 6, 7, 8]
    others = [SPEC, spec(options={"target": 1}), spec(options={"target": 2}), spec(name="s"), spec(source="digest")]
    assert len({cache_key(each, rollouts[0]) for each in others}) == 5


def test_failures_are_not_remembered(score, rollouts):
    assert values(score(faulty.raises, rollouts, cache=True, on_failure="zero")[0]) == [0, 0, 0, 0]
    assert values(score(faulty.right, rollouts, cache=True)[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "2+2="},
        {"completion": "other"},
        {"completion_ids": (5, 2)},
        {"answer": "2"},
        {"metadata": {"level": 1}},
        {"finish_reason": "length"},
        {"messages": ({"role": "user", "content": "hi"},)},
        {"turns": (Turn(role="policy", text="4", token_ids=(5, 2), reward=1.0),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_a_reward_judges_by_is_in_the_key(change):
    rollout = make_rollout(0)
    assert cache_key(SPEC, rollout) != cache_key(SPEC, dataclasses.replace(rollout, **change))


def test_turns_are_in_the_key_without_their_log_probs():
    def key(reward=0.0, logprob=-0.5, said="lower"):
        turns = (
            Turn(role="policy", text="4", token_ids=(5, 2), logprobs=(logprob, logprob), reward=reward),
            Turn(role="environment", text=said, token_ids=(9,), logprobs=(0.0,)),
        )
        return cache_key(SPEC, dataclasses.replace(make_rollout(0), turns=turns))

    assert key() == key(logprob=-0.25)
    assert len({key(), key(reward=1.0), key(said="higher")}) == 3


@given(st.text(), st.text(), st.text(), st.text())
def test_keys_do_not_run_together(prompt, completion, other_prompt, other_completion):
    one = cache_key(SPEC, make_rollout(0, completion, prompt=prompt))
    other = cache_key(SPEC, make_rollout(0, other_completion, prompt=other_prompt))
    assert (one == other) == ((prompt, completion) == (other_prompt, other_completion))


def test_what_cannot_be_written_down_is_asked_each_time(score):
    rollouts = [make_rollout(0, metadata={"tool": object()}), make_rollout(0)]
    reward = counting()
    assert values(score(reward, rollouts, cache=True)[0]) == [1, 2]
    assert values(score(reward, rollouts, cache=True)[0]) == [3, 2]


def test_two_processes_may_share_the_file(tmp_path):
    one, other = ScoreCache(tmp_path / "c"), ScoreCache(tmp_path / "c")
    one.put({"a": 1.0, "b": 2.0})
    other.put({"a": 9.0, "c": 3.0})
    assert one.get(["a", "b", "c", "d"]) == {"a": 1.0, "b": 2.0, "c": 3.0}
    one.close()
    other.close()


def test_many_keys(tmp_path):
    cache = ScoreCache(tmp_path / "c")
    scores = {str(index): float(index) for index in range(1234)}
    cache.put(scores)
    assert cache.get(scores) == scores
    cache.close()


def test_a_broken_file_is_named(tmp_path, rollouts):
    (tmp_path / "rewards.sqlite").write_text("no database " * 100)
    cached = spec(call_options=RewardCallOptions(cache=True))
    with pytest.raises(RewardError, match=r"rewards.sqlite cannot be used") as caught:
        RewardScorer([cached], cache_folder=tmp_path)
    assert "delete" in caught.value.hint
    assert isinstance(caught.value.__cause__, sqlite3.Error)


def test_without_a_folder_scores_are_kept_in_memory(rollouts):
    scorer = RewardScorer([spec(function=counting(), call_options=RewardCallOptions(cache=True))])
    assert values(scorer.score(rollouts)) == values(scorer.score(rollouts)) == [1, 2, 3, 4]
    scorer.close()


def test_a_cache_that_breaks_ends_the_run_whatever_is_said_of_failures(score, rollouts):
    _, scorer = score(faulty.right, rollouts[:1], cache=True, on_failure="zero")
    scorer._runners[0]._callers[-1].close()
    with pytest.raises(RewardError, match=r"rewards.sqlite cannot be used"):
        scorer.score(rollouts)
