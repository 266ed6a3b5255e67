"""What an agent asks at its episode's endpoint, and the rows that come of it."""

import asyncio
import json

import openai
import pytest
from calling_agents import (
    ADD,
    CALL,
    TOKENIZER,
    USER,
    Speaks,
    ask,
    decoded,
    episodes,
    result,
    said,
    sampled,
)
from chat_templates import chat_tokenizer
from playing import rollouts

from rlhf_testing.engine import FakeEngine

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_call_is_a_turn_and_the_next_one_continues_it():
    async def run(client, task, policy):
        first = await ask(client, [USER])
        assert first.choices[0].message.content == "hello"
        assert (first.choices[0].finish_reason, first.model_extra["rlhf"]["turn"]) == ("stop", 0)
        again = {"role": "user", "content": "and?"}
        second = await ask(client, [USER, said(first), again], max_tokens=3)
        assert (second.choices[0].finish_reason, second.usage.completion_tokens) == ("length", 3)
        assert second.usage.prompt_tokens == first.usage.total_tokens + len(TOKENIZER("\n")["input_ids"]) + len(
            TOKENIZER("<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        )
        return 2.0

    (played,) = episodes(run, ["hello", "tin in er"])
    (row,) = played.rows
    (rollout,) = rollouts(played)
    assert played.reward == 2.0 and played.rows[0].columns["environment"]["num_turns"] == 2
    assert rollout.messages == (USER,)
    assert [turn.role for turn in rollout.turns] == ["policy", "environment", "policy"]
    assert decoded(row.ids).startswith("hello<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")
    assert decoded(sampled(row)).startswith("hello<|im_end|>t")


def test_tool_calls_are_read_and_their_results_continue_the_call():
    async def run(client, task, policy):
        first = await ask(client, [USER], tools=[ADD])
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.\n")
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
        message = said(first)
        second = await ask(client, [USER, message, result(message, "3")], tools=[ADD])
        assert second.choices[0].message.content == "3"

    (played,) = episodes(run, [f"Let me see.\n{CALL}", "3"])
    (row,) = played.rows
    assert decoded(sampled(row)) == f"Let me see.\n{CALL}<|im_end|>3<|im_end|>"
    assert "<tool_response>\n3\n</tool_response>" in decoded(row.ids)
    assert '"name": "add"' in row.text
    assert rollouts(played)[0].turns[0].tool_calls[0].name == "add"


def test_a_call_that_cannot_be_read_stays_text_and_is_counted():
    broken = '<tool_call>\n{"name": 1}\n</tool_call>'

    async def run(client, task, policy):
        found = (await ask(client, [USER], tools=[ADD])).choices[0]
        assert (found.message.content, found.message.tool_calls, found.finish_reason) == (broken, None, "stop")

    (played,) = episodes(run, [broken])
    assert played.rows[0].columns["environment"]["bad_tool_calls"] == 1


def test_a_client_that_edits_its_history_opens_a_branch():
    async def run(client, task, policy):
        first = await ask(client, [USER])
        edited = {"role": "assistant", "content": "no"}
        await ask(client, [USER, edited, USER])
        await ask(client, [USER, said(first), USER])

    (played,) = episodes(run, ["hello"])
    assert [row.branch for row in played.rows] == [0, 1]
    assert [sum(turn.role == "policy" for turn in row.turns) for row in played.rows] == [2, 1]
    assert "assistant\nno<|im_end|>" in played.rows[1].text
    assert (
        played.rows[1].prompt_ids
        == TOKENIZER.apply_chat_template(
            [USER, {"role": "assistant", "content": "no"}, USER], add_generation_prompt=True
        )["input_ids"]
        or played.rows[1].text.count("hello") == 2
    )


def test_two_calls_that_continue_one_share_its_tokens_once():
    async def run(client, task, policy):
        first = said(await ask(client, [USER]))
        await ask(client, [USER, first, {"role": "user", "content": "one"}])
        await ask(client, [USER, first, {"role": "user", "content": "two"}])

    (played,) = episodes(run, ["hello", "ll", "er"])
    one, two = played.rows
    assert decoded(sampled(one)) == "hello<|im_end|>ll<|im_end|>"
    assert decoded(sampled(two)) == "er<|im_end|>"
    assert one.turns[:1] == two.turns[:1] and two.num_shared_turns == 1 and len(two.turns[0].token_ids) == 2
    assert "two" in decoded(two.ids) and "one" not in decoded(two.ids)


def test_where_history_is_cut_each_turn_is_a_branch():
    async def run(client, task, policy):
        first = said(await ask(client, [USER]))
        await ask(client, [USER, first, USER])

    thought = "<think>\nhe\n</think>\n\nhello"
    (played,) = episodes(run, [thought], family="qwen3", history="branch")
    assert [len(row.turns) for row in played.rows] == [1, 1]
    assert "he\n</think>" not in played.rows[1].text
    (kept,) = episodes(run, [thought], family="qwen3", history="append")
    assert len(kept.rows) == 1 and kept.rows[0].ids.count(chat_tokenizer("qwen3").eos_token_id) >= 2


def test_where_history_is_cut_a_second_continuation_is_a_branch_without_a_gap():
    async def run(client, task, policy):
        first = said(await ask(client, [USER]))
        for text in ("one", "two"):
            await ask(client, [USER, first, {"role": "user", "content": text}])

    engine = Speaks(chat_tokenizer("qwen3"), ["<think>\nhe\n</think>\n\nhello"])
    (played,) = episodes(run, family="qwen3", engine=engine, history="branch")
    assert (
        [request.branch for call in engine.calls for request in call]
        == [row.branch for row in played.rows]
        == [0, 1, 2]
    )


def test_calls_at_the_same_time_are_branches():
    async def run(client, task, policy):
        found = await asyncio.gather(*(ask(client, [{"role": "user", "content": text}]) for text in ("one", "two")))
        first, second = map(said, found)
        await asyncio.gather(
            ask(client, [{"role": "user", "content": "one"}, first, USER]),
            ask(client, [{"role": "user", "content": "two"}, second, USER]),
        )

    (played,) = episodes(run, ["hello"])
    assert sorted(row.branch for row in played.rows) == [0, 1]
    assert {row.conversation[0]["content"] for row in played.rows} == {"one", "two"}
    assert [len(row.own_turns) for row in played.rows] == [2, 2]


def test_a_blocking_client_plays_on_a_thread():
    async def run(client, task, policy):
        endpoint = await policy.endpoint()

        def work():
            with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as blocking:
                return blocking.chat.completions.create(model=endpoint.model, messages=[USER]).choices[0].message

        assert (await asyncio.to_thread(work)).content == "hello"

    assert len(episodes(run, samples=2)) == 2


def test_a_stop_text_ends_a_reply_and_stays_with_the_policy():
    async def run(client, task, policy):
        first = await ask(client, [USER], stop=["ll"])
        assert first.choices[0].message.content == "he"
        await ask(client, [USER, said(first), USER])

    engine = Speaks(TOKENIZER, ["hell"])
    (played,) = episodes(run, engine=engine)
    assert engine.stops == [("ll",), ()]
    assert decoded(sampled(played.rows[0])[:1]) == "hell"
    assert len(played.rows) == 1


def test_a_stream_has_the_same_answer():
    async def run(client, task, policy):
        chunks = [
            chunk
            async for chunk in await ask(
                client, [USER], tools=[ADD], stream=True, stream_options={"include_usage": True}
            )
        ]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        content = "".join(delta.content or "" for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert (content, call.function.name) == ("Let me see.\n", "add")
        assert chunks[-2].choices[0].finish_reason == "tool_calls" and chunks[-1].usage.completion_tokens > 3
        message = {"role": "assistant", "content": content, "tool_calls": [call.model_dump(exclude={"index"})]}
        await ask(client, [USER, message, result(message, "3")], tools=[ADD])

    (played,) = episodes(run, [f"Let me see.\n{CALL}", "3"])
    assert len(played.rows) == 1


def test_plain_text_is_continued_likewise():
    async def run(client, task, policy):
        first = (await client.completions.create(model="policy", prompt="3+4=")).choices[0].text
        again = await client.completions.create(model="policy", prompt=f"3+4={first};")
        chunks = [c async for c in await client.completions.create(model="policy", prompt="1", stream=True)]
        assert again.usage.prompt_tokens > 5 and "".join(c.choices[0].text for c in chunks) == first

    (played,) = episodes(run, ["hello"])
    first, other = played.rows
    assert (first.text, first.messages) == ("3+4=", None)
    assert decoded(first.ids) == "hello<|im_end|>;hello<|im_end|>"
    assert other.text == "1"


def test_turns_of_the_environment_and_of_the_endpoint_are_turns_of_one_episode():
    async def run(client, task, policy):
        reply = await policy.turn("hello")
        completion = await ask(client, [USER])
        assert (reply.turn, completion.model_extra["rlhf"]["turn"]) == (0, 1)
        assert policy.remaining_turns == 6

    (played,) = episodes(run, ["hello"])
    assert len(played.rows) == 2


def test_episodes_played_again_are_the_same():
    async def run(client, task, policy):
        messages = [USER]
        for _ in range(1 + task.sample_seed % 3):
            messages += [said(await ask(client, messages)), {"role": "user", "content": str(task.seed)}]
        await ask(client, messages[:1])

    def play_all():
        engine = FakeEngine(vocabulary=range(20, 80))
        played = episodes(run, engine=engine, samples=6, max_new_tokens=12)
        return [(row.sequence, row.branch, row.turn_ends) for each in played for row in each.rows]

    assert play_all() == play_all()
