"""What requests of Messages and Responses may say, what is refused by name, and the shapes of streams and errors."""

import json
from dataclasses import replace

import anthropic
import openai
import pytest
from test_server import KEY, REPLY, Owner, connect, request, response, serving

from rlhf_core.types import ToolCall
from rlhf_episodes import CallRefused, ChatMessage, TokenLogprob
from rlhf_serve.dialects.messages.requests import CountBody, MessagesBody
from rlhf_serve.dialects.responses.requests import ResponsesBody
from rlhf_serve.stored import StoredConversations
from rlhf_serve.wire import read

USER = {"role": "user", "content": "hello"}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def messages(kind=MessagesBody, **values):
    limit = {"max_tokens": 9} if kind is MessagesBody else {}
    return read(json.dumps({"messages": [USER], **limit, **values}).encode(), kind, with_extras=True)


def responses(**values):
    return read(json.dumps({"input": "hello", **values}).encode(), ResponsesBody, with_extras=True)


def call(body, stored=None):
    (found,) = body.calls(stored or StoredConversations())
    return found


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [
        (messages, "top_k", 5),
        (messages, "thinking", {"type": "enabled", "budget_tokens": 1024}),
        (messages, "container", "x"),
        (messages, "mcp_servers", [{"name": "x"}]),
        (messages, "tool_choice", {"type": "tool"}),
        (messages, "tool_choice", {"type": "odd"}),
        (messages, "tool_choice.disable_parallel_tool_use", True),
        (messages, "temprature", 0),
        (responses, "text.verbosity", "low"),
        (responses, "reasoning.effort", "low"),
        (responses, "tool_choice", "sometimes"),
        (responses, "parallel_tool_calls", False),
        (responses, "truncation", "auto"),
        (responses, "background", True),
        (responses, "conversation", "conv_1"),
        (responses, "prompt", {"id": "x"}),
    ],
)
def test_an_option_that_would_change_an_answer_is_refused_by_its_name(body, name, value):
    outer, _, inner = name.partition(".")
    given = {"type": "auto", inner: value} if outer == "tool_choice" and inner else {inner: value} if inner else value
    with pytest.raises(CallRefused, match=f"^{name} is not supported here") as caught:
        body(**{outer: given})
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")


def test_options_that_change_nothing_are_taken():
    messages(metadata={"user_id": "me"}, service_tier="auto", top_k=-1, thinking={"type": "disabled"}, system=None)
    messages(cache_control={"type": "ephemeral"}, tool_choice={"type": "auto"}, context_management={"edits": []})
    messages(CountBody, thinking=None, tools=[TOOL])
    responses(store=False, metadata={"a": "b"}, include=["reasoning.encrypted_content"], user="me", background=False)
    responses(text={"format": {"type": "text"}}, reasoning={"effort": None, "summary": "auto"}, truncation="disabled")


@pytest.mark.parametrize(
    ("body", "values", "named"),
    [
        (messages, {"max_tokens": 0}, "max_tokens: .* greater than or equal to 1"),
        (messages, {"max_tokens": None}, "max_tokens: .* valid integer"),
        (messages, {"messages": []}, "messages: .* at least 1"),
        (messages, {"messages": [USER, {"role": "assistant", "content": "a"}]}, "a reply cannot be prefilled"),
        (messages, {"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate"),
        (
            messages,
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "content.0: .*'document'",
        ),
        (messages, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source: "),
        (messages, {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, USER]}, "'thinking'"),
        (
            messages,
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "a message of the role user cannot contain tool_use",
        ),
        (messages, {"system": [{"type": "image"}]}, "system.0.type: .*'text'"),
        (messages, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: .*'custom'"),
        (messages, {"tools": [{"name": "add"}]}, "tools.0.input_schema: Field required"),
        (messages, {"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        (messages, {"temperature": 1e-300}, "temperature: must be 0"),
        (messages, {"stop_sequences": [""]}, "stop_sequences.0"),
        (responses, {"input": []}, "there is nothing to answer"),
        (responses, {"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "input.0: .*'reasoning'"),
        (responses, {"input": [{"role": "wizard", "content": "a"}]}, "input.0.role"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content: must be"),
        (responses, {"input": [{"type": "function_call_output", "call_id": "a", "output": 3}]}, "input.0.output"),
        (responses, {"tools": [{"type": "web_search"}]}, "tools.0.type: .*'function'"),
        (responses, {"max_output_tokens": 0}, "max_output_tokens"),
        (responses, {"top_logprobs": 2}, "top_logprobs needs message.output_text.logprobs in include"),
        (responses, {"previous_response_id": "resp_x"}, "'resp_x' is not stored"),
        (messages, {"messages": [{"role": "user", "content": []}]}, "messages: there is nothing to answer"),
        (responses, {"input": [{"type": "function_call_output", "call_id": "c" * 513, "output": ""}]}, "at most 512"),
    ],
)
def test_values_that_could_not_be_answered_are_refused(body, values, named):
    with pytest.raises(CallRefused, match=named) as caught:
        call(body(**values))
    assert caught.value.status == 400


def test_content_blocks_become_messages():
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    told = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "\ud800"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "t2"},
        {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
    ]
    given = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "add."}, use]},
        {"role": "user", "content": told},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "three"},
    ]
    system = [{"type": "text", "text": "You add."}, {"type": "text", "text": "Only integers."}]
    found = call(messages(messages=given, system=system, tools=[TOOL], stop_sequences=["x"], temperature=0.5))
    calls = {"tool_calls": (ToolCall(name="add", arguments={"a": 1}),), "call_ids": ("t1",)}
    assert found.messages == (
        ChatMessage(role="system", content="You add.\nOnly integers."),
        ChatMessage(role="user", content="one\ntwo"),
        ChatMessage(role="assistant", content="I add.", **calls),
        ChatMessage(role="tool", content="\ud800", tool_call_id="t1"),
        ChatMessage(role="tool", content="", tool_call_id="t2"),
        ChatMessage(role="user", content="so?"),
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="three"),
    )
    assert (found.tools, found.stop, found.max_tokens, found.temperature) == ((CHAT_TOOL,), ("x",), 9, 0.5)
    assert call(messages(tools=[TOOL], tool_choice={"type": "none"})).tools == ()


def test_items_become_messages():
    made = {"type": "function_call", "id": "f", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "one"},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        made,
        {**made, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "\ud800"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        made,
    ]
    found = call(responses(input=given, instructions="You add.", tools=[FUNCTION], max_output_tokens=9))
    add = ToolCall(name="add", arguments={"a": 1})
    assert found.messages == (
        ChatMessage(role="system", content="You add."),
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="one"),
        ChatMessage(role="assistant", content="I add.", tool_calls=(add, add)),
        ChatMessage(role="tool", content="\ud800", tool_call_id="c1"),
        ChatMessage(role="tool", content="3", tool_call_id="c2"),
        ChatMessage(role="assistant", tool_calls=(add,)),
    )
    assert found.messages[3].call_ids == ("c1", "c2")
    assert (found.tools, found.max_tokens) == ((CHAT_TOOL,), 9)


class Answers(Owner):
    """Answers with a text and a call, or with what it is given."""

    def __init__(self, reply=None):
        super().__init__()
        self.reply = reply or replace(REPLY, tool_calls=(ToolCall(name="add", arguments={"a": 1}),))

    async def answer(self, call):
        await super().answer(call)
        return self.reply

    async def count_tokens(self, call):
        return len(call.messages)


class Served(Answers):
    """Like a served model."""

    async def answer_all(self, calls):
        return [await self.answer(each) for each in calls]


def events(port, path, body):
    """The names and data of a stream."""
    with connect(port) as connection:
        headers = {"Authorization": None, "X_Api_Key": KEY, "anthropic_version": "2023-06-01", "Connection": "close"}
        connection.sendall(request(path=path, body=json.dumps(body | {"stream": True}).encode(), **headers))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    blocks = received.decode().split("\r\n\r\n", 1)[1].strip().split("\n\n")
    pairs = [block.split("\n") for block in blocks]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert all(name == data["type"] for name, data in found)
    return found


def test_the_events_of_messages():
    """The order of Anthropic's documentation of streams."""
    with serving(Answers()) as (port, _):
        found = events(port, "/v1/messages", {"model": "m", "max_tokens": 9, "messages": [USER]})
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in found] == ["message_start", *block, *block, "message_delta", "message_stop"]
    (_, start), (_, text), (_, text_delta), _, (_, use), (_, use_delta), *_, (_, delta), _ = found
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert start["message"]["usage"]["input_tokens"] == 4
    assert (text["index"], text["content_block"]["text"]) == (0, "")
    assert text_delta["delta"] == {"type": "text_delta", "text": "7"}
    assert (use["index"], use["content_block"]["name"], use["content_block"]["input"]) == (1, "add", {})
    assert use_delta["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 2


def test_the_events_of_responses():
    """The order of OpenAI's documentation of streams."""
    with serving(Answers()) as (port, _):
        found = events(port, "/v1/responses", {"model": "m", "input": "hello"})
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = ["output_item.added", *text, "output_item.done", "output_item.added", *arguments, "output_item.done"]
    names = ["created", "in_progress", *items, "completed"]
    assert [name for name, _ in found] == [f"response.{name}" for name in names]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    first, last = found[0][1]["response"], found[-1][1]["response"]
    assert (first["status"], first["output"], last["status"]) == ("in_progress", [], "completed")
    assert [item["type"] for item in last["output"]] == ["message", "function_call"]
    for name, data in found:
        if name == "response.output_item.added":
            assert data["item"]["status"] == "in_progress"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ("end_turn", None)),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"stop_text": "x"}, ("stop_sequence", "x")),
        ({"stop_text": "x", "tool_calls": (ToolCall(name="add"),)}, ("tool_use", None)),
    ],
)
def test_the_stop_reasons_of_messages(change, reason):
    with serving(Answers(replace(REPLY, **change))) as (port, _), messages_client(port) as client:
        found = client.messages.create(model="m", max_tokens=9, messages=[USER])
        assert (found.stop_reason, found.stop_sequence) == reason


def messages_client(port, key=KEY):
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0)


def responses_client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


def test_an_empty_reply_is_a_message():
    with serving(Answers(replace(REPLY, text=""))) as (port, _):
        with messages_client(port) as client:
            assert client.messages.create(model="m", max_tokens=9, messages=[USER]).content == []
        with responses_client(port) as client:
            assert [item.type for item in client.responses.create(model="m", input="hello").output] == ["message"]


def test_errors_and_models_have_the_form_of_the_dialect():
    class Refuses(Answers):
        async def answer(self, call):
            raise CallRefused(400, "context_length_exceeded", "it has 9 tokens")

    with serving(Refuses(), model="mine", max_body_bytes=1000) as (port, _), messages_client(port) as client:
        asked = {"model": "mine", "max_tokens": 9, "messages": [USER]}
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: it has 9 tokens") as caught:
            client.messages.create(**asked)
        assert (caught.value.error_code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(**{**asked, "model": "other"})
        assert (caught.value.error_code, caught.value.type) == ("model_not_found", "not_found_error")
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**asked, system="x" * 2000)
        assert (caught.value.status_code, caught.value.body["error"]["type"]) == (413, "request_too_large")
        with pytest.raises(anthropic.NotFoundError):
            client.post("/v1/nothing", body={}, cast_to=object)
        with messages_client(port, "guess") as other, pytest.raises(anthropic.AuthenticationError) as caught:
            other.models.list()
        assert caught.value.type == "authentication_error"
        assert [(model.id, model.type) for model in client.models.list()] == [("mine", "model")]


def test_many_calls_are_one_message():
    """They are converted in linear time: a copy of the earlier ones for each would take minutes."""
    made = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    assert len(call(responses(input=[made] * 50_000)).messages[0].tool_calls) == 50_000


def test_one_of_two_keys_is_enough():
    with serving(Answers(REPLY)) as (port, _), connect(port) as connection:
        for keys in ({"key": KEY, "X_Api_Key": "other"}, {"key": "other", "X_Api_Key": KEY}):
            connection.sendall(request(**keys))
            assert response(connection)[0] == 200
        connection.sendall(request(key="other", X_Api_Key="another"))
        assert response(connection)[0] == 401


def test_conversations_are_of_one_key():
    with serving(Answers()) as (port, _), serving(Answers()) as (other, _):
        with responses_client(port) as client:
            first = client.responses.create(model="m", input="hello")
            assert client.responses.create(model="m", input="so?", previous_response_id=first.id).output
        with responses_client(other) as client, pytest.raises(openai.BadRequestError, match="is not stored"):
            client.responses.create(model="m", input="so?", previous_response_id=first.id)


def test_instructions_do_not_belong_to_the_stored_conversation():
    owner = Answers(REPLY)
    with serving(owner) as (port, _), responses_client(port) as client:
        first = client.responses.create(model="m", input="one", instructions="Be brief.")
        client.responses.create(model="m", input="two", previous_response_id=first.id)
    assert [(each.role, each.content) for each in owner.calls[1].messages] == [
        ("user", "one"),
        ("assistant", "7"),
        ("user", "two"),
    ]


def test_log_probs_of_a_served_model():
    tokens = (TokenLogprob("7", -0.5, (("7", -0.5),)),)
    owner = Served(replace(REPLY, tokens=tokens))
    asked = {"model": "m", "input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    with serving(owner) as (port, _), responses_client(port) as client:
        (found,) = client.responses.create(**asked).output[0].content[0].logprobs
        assert (found.token, found.logprob, found.top_logprobs[0].logprob) == ("7", -0.5, -0.5)
        assert owner.calls[0].top_logprobs == 1
    refused = pytest.raises(openai.BadRequestError, match="logprobs is not supported here: omit it from include")
    with serving(Answers()) as (port, _), responses_client(port) as client, refused:
        client.responses.create(**asked)
