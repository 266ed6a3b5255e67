"""Where an episode ends: bounds on turns, on tokens, and on tokens of several branches."""

from __future__ import annotations

import asyncio

import pytest
from chat_templates import chat_tokenizer
from playing import EOS, Echo, Says, driven, items, play_one, rollouts, three_digits

from rlhf_core.prompts.stream import PromptEncoder
from rlhf_episodes.contract import EpisodeTruncated, Outcome
from rlhf_testing.engine import FakeEngine


def test_after_the_last_turn_the_step_counts_and_its_observation_is_dropped():
    played = play_one(Echo, engine=Says(three_digits), max_turns=2)
    (rollout,) = rollouts(played)
    assert played.reward == 3.0
    assert rollout.completion_ids == (11, 12, EOS, 14, 4, 11, 12, EOS)
    assert rollout.finish_reason == "length"
    assert items(played)[0].truncated
    assert played.rows[0].columns["environment"]["truncated"] == 1.0


def test_done_at_the_last_turn_is_done():
    played = play_one(Echo, engine=Says(three_digits), max_turns=3)
    assert (played.rows[0].columns["environment"]["truncated"], played.rows[0].finish_reason) == (0.0, "stop")


@pytest.mark.parametrize("bound", [{"max_tokens": 6}, {"context_tokens": 9}])
def test_a_bound_on_tokens_cuts_the_turn_that_reaches_it(bound):
    engine = Says(three_digits)
    played = play_one(Echo, engine=engine, **bound)
    assert [request.max_new_tokens for (request,) in engine.calls] == [4, 1]
    (rollout,) = rollouts(played)
    assert rollout.completion_ids == (11, 12, EOS, 14, 4, 11)
    assert (rollout.finish_reason, played.rows[0].columns["environment"]["truncated"], played.reward) == (
        "length",
        1.0,
        3.0,
    )


@pytest.mark.parametrize("max_tokens", [3, 4, 5])
def test_an_observation_that_leaves_no_room_is_taken_back(max_tokens):
    played = play_one(Echo, engine=Says(three_digits), max_tokens=max_tokens)
    (rollout,) = rollouts(played)
    assert rollout.completion_ids == (11, 12, EOS)
    assert (rollout.finish_reason, played.reward) == ("length", 1.0)


def test_a_bound_on_tokens_is_for_all_branches_and_counts_what_they_share_once():
    told = []

    async def run(task, policy):
        await policy.turn()  # 3 tokens
        other = policy.fork()
        await other.turn(">")  # one given, 3 sampled
        told.append((policy.remaining_tokens, other.remaining_tokens))
        await policy.turn(">")
        told.append((policy.remaining_tokens, other.remaining_tokens))
        with pytest.raises(EpisodeTruncated, match="no token is left"):
            await policy.turn(">>>")
        told.append(other.remaining_tokens)
        return Outcome(status="truncated")

    engine = Says(three_digits)
    played = play_one(driven(run), engine=engine, max_tokens=13, max_turns=9)
    assert told == [(6, 6), (2, 2), 2]
    assert [request.max_new_tokens for (request,) in engine.calls] == [4, 4, 4]
    assert [rollout.completion_ids for rollout in rollouts(played)] == [(11, 12, EOS, 14, 11, 12, EOS)] * 2
    assert played.rows[0].columns["environment"]["response_tokens"] == 11.0


def test_turns_at_the_same_time_keep_the_bound_together():
    async def run(task, policy):
        await policy.turn()
        branches = [policy, policy.fork(), policy.fork()]
        found = await asyncio.gather(*(branch.turn() for branch in branches), return_exceptions=True)
        left.append(policy.remaining_tokens)
        return Outcome(metrics={"refused": sum(isinstance(each, EpisodeTruncated) for each in found)})

    left = []
    engine = Says(three_digits)
    played = play_one(driven(run), engine=engine, max_tokens=9)
    assert [[request.max_new_tokens for request in call] for call in engine.calls] == [[4], [4, 2]]
    assert (
        played.rows[0].columns["environment"]["own/refused"],
        played.rows[0].columns["environment"]["response_tokens"],
        left,
    ) == (1.0, 8.0, [1])


def test_a_branch_that_history_opens_does_not_begin_the_bound_anew():
    tokenizer = chat_tokenizer("qwen3-no-thinking")  # cuts its empty thought from every earlier turn
    prompt = PromptEncoder(tokenizer).prompt({"prompt": [{"role": "user", "content": "hello"}]}, 0, "test")
    engine = FakeEngine(answer=lambda request, version: [5, 6, 7])
    options = {"tokenizer": tokenizer, "prompt": prompt, "history": "branch", "max_new_tokens": 3}
    played = play_one(lambda: Echo(turns=9, observations=["on"] * 9), engine=engine, max_tokens=7, **options)
    assert [len(row.ids) for row in played.rows] == [3, 3, 1]
    assert played.rows[0].columns["environment"]["truncated"] == 1.0


def test_remaining_turns_and_tokens_are_told():
    told = []

    async def run(task, policy):
        told.append((policy.remaining_turns, policy.remaining_tokens))
        for _ in range(2):
            await policy.turn(">")
            told.append((policy.remaining_turns, policy.remaining_tokens))
        return Outcome()

    play_one(driven(run), engine=Says(three_digits), max_turns=5, max_tokens=20)
    assert told == [(5, 20), (4, 17), (3, 13)]


def test_an_environment_may_let_the_end_of_its_turns_through():
    async def run(task, policy):
        while True:
            await policy.turn(">")

    played = play_one(driven(run), engine=Says(three_digits), max_turns=2)
    assert (played.rows[0].columns["environment"]["truncated"], played.rows[0].columns["environment"]["num_turns"]) == (
        1.0,
        2.0,
    )

    async def catches(task, policy):
        await policy.turn()
        with pytest.raises(EpisodeTruncated):
            await policy.turn()
        return Outcome(reward=2.0, metrics={"found": 1})

    played = play_one(driven(catches), max_turns=1)
    assert (played.reward, played.rows[0].columns["environment"]["own/found"]) == (2.0, 1.0)
