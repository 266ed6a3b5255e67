"""The official clients of each dialect behind one interface, so that a test runs with each of them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


@dataclass(frozen=True)
class Said:
    """A reply."""

    text: str
    calls: list[tuple[str, dict[str, Any]]]
    reason: str
    """`stop`, `tools` or `length`."""
    num_tokens: tuple[int, int]
    """Of the prompt and of the reply."""
    turn: int
    back: list[Any] = field(repr=False)
    """Items that put the reply into the next request."""
    call_ids: list[str] = field(default_factory=list)


class Chat:
    """Chat completions by `openai`."""

    error, statuses = openai.APIStatusError, {"bad": openai.BadRequestError, "key": openai.AuthenticationError}
    tools = ({"type": "function", "function": FUNCTION},)

    def __init__(self, endpoint, **options):
        key = options.pop("api_key", endpoint.api_key)
        self.client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0, **options)
        self.model = endpoint.model

    def user(self, text):
        return [{"role": "user", "content": text}]

    def result(self, said, text):
        return [{"role": "tool", "tool_call_id": said.call_ids[0], "content": text}]

    def edited(self, text):
        return [{"role": "assistant", "content": text}]

    def code(self, error):
        return error.code

    async def ask(self, history, *, system=None, tools=False, stream=False, max_tokens=100, **options):
        first = [] if system is None else [{"role": "system", "content": system}]
        options |= {"tools": self.tools} if tools else {}
        asked = {"model": self.model, "messages": [*first, *history], "max_tokens": max_tokens, **options}
        create = self.client.chat.completions.create
        if not stream:
            found = await create(**asked)
            return self.said(found, found.choices[0].message.model_dump(exclude_none=True))
        chunks = [each async for each in await create(**asked, stream=True, stream_options={"include_usage": True})]
        message = {"role": "assistant", "content": ""}
        for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
            message["content"] += delta.content or ""
            if delta.tool_calls:
                message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in delta.tool_calls]
        last = next(chunk for chunk in reversed(chunks) if chunk.choices)
        last.usage = chunks[-1].usage
        return self.said(last, message)

    def said(self, found, message):
        reasons = {"tool_calls": "tools"}
        calls = message.get("tool_calls", [])
        functions = [call["function"] for call in calls]
        return Said(
            message.get("content") or "",
            [(each["name"], json.loads(each["arguments"])) for each in functions],
            reasons.get(found.choices[0].finish_reason, found.choices[0].finish_reason),
            (found.usage.prompt_tokens, found.usage.completion_tokens),
            found.model_extra["rlhf"]["turn"],
            [message],
            [call["id"] for call in calls],
        )


class Messages:
    """Messages by `anthropic`."""

    error, statuses = anthropic.APIStatusError, {"bad": anthropic.BadRequestError, "key": anthropic.AuthenticationError}
    tools = ({"name": "add", "description": FUNCTION["description"], "input_schema": PARAMETERS},)

    def __init__(self, endpoint, **options):
        key = options.pop("api_key", endpoint.api_key)
        url = endpoint.anthropic_base_url
        self.client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, **options)
        self.model = endpoint.model

    def user(self, text):
        return [{"role": "user", "content": text}]

    def result(self, said, text):
        block = {"type": "tool_result", "tool_use_id": said.call_ids[0], "content": text}
        return [{"role": "user", "content": [block]}]

    def edited(self, text):
        return [{"role": "assistant", "content": text}]

    def code(self, error):
        return error.error_code

    def asked(self, history, system, tools):
        first = {} if system is None else {"system": [{"type": "text", "text": system}]}
        return {"model": self.model, "messages": history, **first, **({"tools": self.tools} if tools else {})}

    async def count(self, history, *, system=None, tools=False):
        return (await self.client.messages.count_tokens(**self.asked(history, system, tools))).input_tokens

    async def ask(self, history, *, system=None, tools=False, stream=False, max_tokens=100, **options):
        asked = {**self.asked(history, system, tools), "max_tokens": max_tokens, **options}
        if "temperature" in asked:  # the client no longer knows it
            asked["extra_body"] = {"temperature": asked.pop("temperature")}
        if not stream:
            return self.said(await self.client.messages.create(**asked))
        async with self.client.messages.stream(**asked) as events:
            return self.said(await events.get_final_message())

    def said(self, found):
        calls = [block for block in found.content if block.type == "tool_use"]
        reasons = {"tool_use": "tools", "max_tokens": "length"}
        return Said(
            "".join(block.text for block in found.content if block.type == "text"),
            [(call.name, call.input) for call in calls],
            reasons.get(found.stop_reason, "stop"),
            (found.usage.input_tokens, found.usage.output_tokens),
            found.model_extra["rlhf"]["turn"],
            [found.to_param()],
            [call.id for call in calls],
        )


class Responses:
    """Responses by `openai`, each request with the whole conversation."""

    error, statuses = Chat.error, Chat.statuses
    tools = ({"type": "function", **FUNCTION, "strict": True},)
    by_id = False

    def __init__(self, endpoint, **options):
        self.client = Chat(endpoint, **options).client
        self.model = endpoint.model

    def user(self, text):
        return [{"role": "user", "content": text}]

    def result(self, said, text):
        return [{"type": "function_call_output", "call_id": said.call_ids[0], "output": text}]

    def edited(self, text):
        return [{"role": "assistant", "content": text}]

    def code(self, error):
        return error.code

    def asked(self, history, system, tools):
        places = [place for place, item in enumerate(history) if "previous" in item]
        first = {} if system is None else {"instructions": system}
        if places:
            first |= {"previous_response_id": history[places[-1]]["previous"]}
            history = history[places[-1] + 1 :]
        return {"model": self.model, "input": history, **first, **({"tools": self.tools} if tools else {})}

    async def count(self, history, *, system=None, tools=False):
        found = await self.client.responses.input_tokens.count(**self.asked(history, system, tools))
        return found.input_tokens

    async def ask(self, history, *, system=None, tools=False, stream=False, max_tokens=100, **options):
        asked = {**self.asked(history, system, tools), "max_output_tokens": max_tokens, **options}
        if not stream:
            return self.said(await self.client.responses.create(**asked))
        events = [event async for event in await self.client.responses.create(**asked, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        found = events[-1].response
        assert found.output == [event.item for event in events if event.type == "response.output_item.done"]
        assert found.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
        return self.said(found)

    def said(self, found):
        calls = [item for item in found.output if item.type == "function_call"]
        reason = "length" if found.status == "incomplete" else "tools" if calls else "stop"
        back = [item.model_dump(exclude_none=True) for item in found.output]
        return Said(
            found.output_text,
            [(call.name, json.loads(call.arguments)) for call in calls],
            reason,
            (found.usage.input_tokens, found.usage.output_tokens),
            found.model_extra["rlhf"]["turn"],
            [{"previous": found.id}] if self.by_id else back,
            [call.call_id for call in calls],
        )


class ChainedResponses(Responses):
    """Responses by `openai`, each request with the id of the previous response."""

    by_id = True


CLIENTS = [Chat, Messages, Responses, ChainedResponses]


@asynccontextmanager
async def client_of(kind, endpoint, **options):
    """A client of an endpoint."""
    asking = kind(endpoint, **options)
    async with asking.client:
        yield asking
