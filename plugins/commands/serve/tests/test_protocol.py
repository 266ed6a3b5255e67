"""What bodies of requests may say, and what is refused by name."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest
from test_server import KEY, Owner, connect, request, response, serving

from rlhf_episodes import CallRefused
from rlhf_serve.dialects.completions.requests import ChatBody, TextBody
from rlhf_serve.stored import StoredConversations
from rlhf_serve.wire import read

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add"}}


def chat(**values):
    return read(json.dumps({"messages": MESSAGES, **values}).encode(), ChatBody, with_extras=True)


def text(**values):
    return read(json.dumps({"prompt": "3+4=", **values}).encode(), TextBody, with_extras=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.2),
        ("min_tokens", 3),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("structured_outputs", {"choice": ["a"]}),
        ("parallel_tool_calls", False),
        ("reasoning_effort", "low"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("best_of", 2),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {}}),
        ("temprature", 0),
    ],
)
@pytest.mark.parametrize("body", [chat, text])
def test_an_option_that_would_change_an_answer_is_refused_by_its_name(body, name, value):
    with pytest.raises(CallRefused, match=f"^{name} is not supported here") as caught:
        body(**{name: value})
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")


@pytest.mark.parametrize("body", [chat, text])
def test_options_that_change_nothing_are_taken(body):
    body(top_k=-1, min_p=0, repetition_penalty=1.0, n=1, user="me", metadata={}, guided_json=None, logprobs=False)


@pytest.mark.parametrize(
    ("path", "values", "said"),
    [
        ("chat/completions", {"n": 2}, "n is not supported here: omit it"),
        ("chat/completions", {"logprobs": True}, "logprobs is not supported here: omit it"),
        ("completions", {"n": 2}, "n is not supported here: omit it"),
        ("completions", {"logprobs": 0}, "logprobs is not supported here: omit it"),
        ("completions", {"echo": True}, "echo is not supported here: omit it"),
        ("completions", {"prompt": [3, 4]}, "prompt: token ids are not supported here, send text"),
    ],
)
def test_what_only_a_served_model_can_is_refused_by_an_episode(path, values, said):
    owner, body = Owner(), {"messages": MESSAGES} if path.startswith("chat") else {"prompt": "3+4="}
    with serving(owner) as (port, _), connect(port) as connection:
        connection.sendall(request(path=f"/v1/{path}", body=json.dumps(body | values).encode()))
        status, _, found = response(connection)
    assert (status, found["error"]["message"], owner.calls) == (400, said, [])


def calling(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def test_without_tool_choice_the_model_sees_no_tools():
    assert (
        chat(tools=[TOOL]).calls(StoredConversations())[0].tools
        == chat(tools=[TOOL], tool_choice="auto").calls(StoredConversations())[0].tools
        == (TOOL,)
    )
    assert chat(tools=[TOOL], tool_choice="none").calls(StoredConversations())[0].tools == ()


@pytest.mark.parametrize(
    ("body", "values", "named"),
    [
        (text, {"prompt": "a\ud800"}, "prompt.0: .* unicode string"),
        (text, {"prompt": ["a", "\udfff"]}, "prompt.1: .* unicode string"),
        (chat, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0: has half of a surrogate"),
        (chat, {"stop": ["\ud800"]}, "stop.0: .* unicode string"),
        (
            chat,
            {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
            "tools.0: has half of a surrogate",
        ),
        (chat, {"tools": [{**TOOL, "\udc00": 1}]}, "tools.0: has half of a surrogate"),
        (chat, {"messages": [calling("a\ud800", "{}")]}, "function.name: .* unicode string"),
        (chat, {"messages": [calling("a", '{"b": "\\ud800"}')]}, "function.arguments: has half of a surrogate"),
        (chat, {"messages": [calling("a", '{"b\udfff": 1}')]}, "function.arguments: has half of a surrogate"),
        (chat, {"temperature": 1e-300}, "temperature: must be 0"),
        (text, {"temperature": 1e-300}, "temperature: must be 0"),
        (text, {"prompt": []}, "prompt: .* at least 1"),
        (text, {"prompt": [[]]}, "prompt.0: .* at least 1"),
        (text, {"prompt": [1, "a"]}, "prompt.0: Input should be a valid string"),
        (text, {"prompt": [[1, -2]]}, "prompt.0.1: .* greater than or equal to 0"),
        (text, {"prompt": [True]}, "prompt.0: Input should be a valid string"),
        (text, {"prompt": ["a"] * 129}, "at most 128"),
        (text, {"prompt": ["a"] * 64, "n": 3}, "n: 3 answers to each of 64 prompts are more than 128"),
        (text, {"n": 0}, "n: .* greater than or equal to 1"),
        (chat, {"n": 129}, "n: .* less than or equal to 128"),
        (chat, {"n": True}, "n: Input should be a valid integer"),
        (chat, {"logprobs": 3}, "logprobs: Input should be a valid boolean"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs: .* less than or equal to 20"),
        (chat, {"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        (text, {"logprobs": True}, "logprobs: Input should be a valid integer"),
        (text, {"logprobs": 21}, "logprobs: .* less than or equal to 20"),
        (text, {"max_tokens": 0}, "max_tokens: 0 needs echo: true"),
        (text, {"stream": "yes"}, "stream: Input should be a valid boolean"),
        (text, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage: .* valid boolean"),
    ],
)
def test_values_that_could_not_be_answered_are_refused(body, values, named):
    with pytest.raises(CallRefused, match=named) as caught:
        body(**values)
    assert caught.value.status == 400


def test_what_a_tool_printed_may_be_half_a_character():
    messages = [*MESSAGES, {"role": "tool", "tool_call_id": "a", "content": "\ud800"}]
    assert chat(messages=messages).calls(StoredConversations())[0].messages[1].content == "\ud800"


class Echoes(Owner):
    """Answers with the call's text; a second one begins before the first has ended."""

    async def answer(self, call):
        number = len(self.calls)
        found = await super().answer(call)
        await asyncio.sleep(0.01 if number == 0 else 0)
        return replace(found, text=call.text, turn=number)


def test_several_prompts_have_their_answers_in_order():
    owner = Echoes()
    with serving(owner) as (port, _), openai.OpenAI(**client(port)) as asking:
        found = asking.completions.create(model="m", prompt=["one", "two"], seed=7)
        assert [(each.index, each.text) for each in found.choices] == [(0, "one"), (1, "two")]
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (8, 4)
        chunks = list(asking.completions.create(model="m", prompt=["one", "two"], stream=True))
        texts = {index: "".join(c.choices[0].text for c in chunks if c.choices[0].index == index) for index in (0, 1)}
        assert texts == {0: "one", 1: "two"}
    assert [call.seed for call in owner.calls[:2]] == [7, 8]


def test_where_one_of_several_prompts_is_refused_the_others_are_cancelled():
    class Refuses(Owner):
        async def answer(self, call):
            if call.text == "no":
                raise CallRefused(400, "invalid_request", "no")
            return await super().answer(call)

    owner = Refuses(waits=True)
    with serving(owner) as (port, _), connect(port) as connection:
        connection.sendall(request(body=json.dumps({"prompt": ["yes", "no"]}).encode()))
        assert response(connection)[0] == 400
    assert owner.cancelled == 1


def client(port):
    return {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": KEY, "max_retries": 0}


def test_a_model_of_another_name_is_not_found():
    with serving(Owner(), model="mine") as (port, _), openai.OpenAI(**client(port)) as asking:
        with pytest.raises(openai.NotFoundError, match="'other' does not exist: this server has 'mine'") as caught:
            asking.completions.create(model="other", prompt="1")
        assert (caught.value.status_code, caught.value.code) == (404, "model_not_found")
        assert asking.completions.create(model="mine", prompt="1").model == "mine"
        with connect(port) as connection:
            connection.sendall(request(body=b'{"prompt": "1"}'))
            assert response(connection)[2]["model"] == "mine"


def test_no_two_servers_give_the_same_ids():
    found = []
    for _ in range(2):
        with serving(Owner(), model="mine") as (port, _), openai.OpenAI(**client(port)) as asking:
            found.append(asking.completions.create(model="mine", prompt="1").id)
    assert len(set(found)) == 2


def test_health_needs_no_key():
    with serving(Owner()) as (port, _), connect(port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        assert response(connection)[::2] == (200, {"status": "ok"})
        connection.sendall(request(path="/health", key="wrong"))
        assert response(connection)[0] == 405
