"""Formats of answers and forced calls, by the official clients: served, and as turns of a run."""

import asyncio
import json
from pathlib import Path

import anthropic
import openai
import pytest
from adding_agent import QUESTION
from calling_agents import ask, episodes, run_file
from structured_agent import ADD, FORMAT, SCHEMA
from test_serve import client_of

from rlhf_core import train
from rlhf_episodes.call_grammars import calls_grammar
from rlhf_episodes.tool_calls import FORMATS
from rlhf_forward import Structure, vocabulary_of
from rlhf_testing.episodes import CHARACTERS
from rlhf_testing.models import tiny_tokenizer

pytest.importorskip("llguidance")

AGENT = Path(__file__).with_name("structured_agent.py")
ANSWERS = ("yes", "no", 12)
TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}
LARGE = {"const": "x" * 40_000}
OTHER = {"name": "other", "input_schema": {"type": "object"}}


def test_chat_completions(tool_model):
    async def run():
        async with client_of(tool_model, max_new_tokens=90) as client:

            async def chat(**options):
                answer = await client.chat.completions.create(model="mine", messages=QUESTION, **options)
                return answer.choices[0]

            for temperature in (0, 1, 1):
                found = await chat(response_format=FORMAT, temperature=temperature)
                assert json.loads(found.message.content) in ANSWERS and found.finish_reason == "stop"
            found = await chat(response_format={"type": "json_object"}, temperature=0)
            assert found.message.content.lstrip().startswith("{")
            found = await chat(tools=[ADD], tool_choice="required", parallel_tool_calls=False)
            assert found.finish_reason == "tool_calls" and set(called(found.message)[0]) == {"a"}
            forced = {"type": "function", "function": {"name": "add"}}
            found = await chat(tools=[ADD, other_function()], tool_choice=forced)
            assert found.message.tool_calls[0].function.name == "add"
            found = await chat(tools=[ADD], response_format=FORMAT)
            assert found.message.tool_calls or json.loads(found.message.content) in ANSWERS
            asked = {"model": "mine", "messages": QUESTION, "response_format": FORMAT}
            chunks = [each async for each in await client.chat.completions.create(**asked, stream=True)]
            content = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
            assert json.loads(content) in ANSWERS
            both = await client.chat.completions.create(**asked, n=2)
            assert all(json.loads(each.message.content) in ANSWERS for each in both.choices)

    asyncio.run(run())


def called(message):
    return [json.loads(each.function.arguments) for each in message.tool_calls]


def other_function():
    return {"type": "function", "function": {"name": OTHER["name"], "parameters": OTHER["input_schema"]}}


def test_responses_and_messages(tool_model):
    async def run():
        async with client_of(tool_model, max_new_tokens=90) as client:
            text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
            found = await client.responses.create(model="mine", input="1 and 2?", text=text)
            assert json.loads(found.output_text) in ANSWERS and found.text.format.type == "json_schema"
            function = {"type": "function", "name": "add", "parameters": TOOL["input_schema"], "strict": True}
            forced = {"type": "function", "name": "add"}
            found = await client.responses.create(model="mine", input="hello", tools=[function], tool_choice=forced)
            assert [(each.type, each.name) for each in found.output] == [("function_call", "add")]
            base_url = str(client.base_url).removesuffix("/").removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=base_url, api_key=client.api_key, max_retries=0) as other:
                asked = {"model": "mine", "max_tokens": 90, "messages": QUESTION}
                single = {"type": "any", "disable_parallel_tool_use": True}
                for choice in ({"type": "tool", "name": "add"}, single):
                    found = await other.messages.create(**asked, tools=[TOOL, OTHER][:1], tool_choice=choice)
                    (block,) = found.content
                    assert (block.type, block.name, set(block.input)) == ("tool_use", "add", {"a"})
                    assert found.stop_reason == "tool_use"
                config = {"format": {"type": "json_schema", "schema": SCHEMA}}
                found = await other.messages.create(**asked, output_config=config)
                assert json.loads(found.content[0].text) in ANSWERS

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": {**FORMAT, "json_schema": {"name": "a", "schema": {"type": "odd"}}}}, "invalid"),
        ({"response_format": {"type": "json_schema"}}, "json_schema: is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "a", "schema": {"const": "x" * 40_000}}}},
            "32768 bytes",
        ),
        ({"tool_choice": "required"}, "tool_choice: forces a call, but tools are missing"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "no tool 'sub'"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls is not supported"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice is not supported"),
    ],
    ids=range(8),
)
def test_what_cannot_work_is_refused(options, message, tool_model):
    async def run():
        async with client_of(tool_model, max_new_tokens=8) as client:
            with pytest.raises(openai.BadRequestError, match=message):
                await client.chat.completions.create(model="mine", messages=QUESTION, extra_body=options)
            assert (await client.chat.completions.create(model="mine", messages=QUESTION)).choices

    asyncio.run(run())


def test_an_engine_without_structures_is_refused_by_name():
    async def run(client, task, policy):
        with pytest.raises(openai.BadRequestError, match="does not sample structured answers") as caught:
            await ask(client, QUESTION, response_format=FORMAT)
        assert caught.value.code == "unsupported_parameter"
        assert (await ask(client, QUESTION)).model_extra["rlhf"]["turn"] == 0, "a refused call costs no turn"

    episodes(run)


def test_calls_that_wait_for_their_structures_do_not_exceed_the_turns(monkeypatch):
    async def slow(self, call, chat):
        await asyncio.sleep(0.05)
        return {}

    async def run(client, task, policy):
        found = await asyncio.gather(ask(client, QUESTION), ask(client, QUESTION), return_exceptions=True)
        assert sorted(getattr(each, "code", None) or "answer" for each in found) == ["answer", "turns_used_up"]

    monkeypatch.setattr("rlhf_episodes.AnswerStructures.options", slow)
    episodes(run, max_turns=1)


def test_a_run_trains_on_the_masked_distribution(tmp_path, tool_model):
    changes = {"environment": {"name": f"{AGENT}:Structured", "max_turns": 4}}
    result = train(run_file(tool_model, **changes), output=tmp_path / "run")
    assert result.summary["status"] == "done"
    assert max(line["rollout/logprob_gap_max"] for line in result.metrics) < 1e-4
    assert all(line["environment/is_structured"] == 1 for line in result.metrics)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("several", [False, True])
def test_a_forced_call_is_readable_in_every_format(name, several):
    tokenizer, tool_format = tiny_tokenizer(CHARACTERS), FORMATS[name]
    grammar = calls_grammar(tool_format, tokenizer, [ADD, other_function()], several=several)
    answer = vocabulary_of(tokenizer, [2]).answer(Structure("lark", grammar), where="test")
    written = tool_format.joined(calls_of(2 if several else 1))
    for token in tokenizer.encode(written):
        allowed = answer.allowed()
        assert allowed[token // 8] >> token % 8 & 1, tokenizer.decode([token])
        answer.add(token)
    assert answer.allowed()[0] >> 2 & 1, "the answer may end here"


def calls_of(number):
    return FORMATS["hermes"].parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * number)
