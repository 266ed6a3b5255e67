"""Items of a request's input, and their conversion to messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, model_validator

from rlhf_core.types import ToolCall
from rlhf_episodes import ChatMessage

from ...contents import Content, read_content
from ...fields import Arguments, Id, Text, check_text
from ...wire import Part

_TEXT_TYPES = ("input_text", "output_text")


def _read_content(value: Any) -> Any:
    """Return the content of a message. An image part is `{"type": "input_image", "image_url": "data:…"}`."""
    return read_content(value, _TEXT_TYPES, "input_image", lambda part: part.get("image_url"))


class _Message(Part):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Content, BeforeValidator(_read_content)]

    @model_validator(mode="after")
    def _is_text(self) -> _Message:
        check_text(self.content.text)
        if self.role != "user" and self.content.images:
            raise ValueError(f"a message of the role {self.role} cannot contain images")
        return self


class _FunctionCall(Part):
    type: Literal["function_call"]
    call_id: Id
    name: Text
    arguments: Arguments


class _FunctionOutput(Part):
    type: Literal["function_call_output"]
    call_id: Id
    output: Annotated[Content, BeforeValidator(_read_content)]
    """Unlike other texts, it is not checked, since a tool may print anything."""


def _type_of(value: Any) -> Any:
    """Type of an item. Messages may omit it."""
    return value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)


Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_FunctionOutput, Tag("function_call_output")],
    Discriminator(_type_of),
]
"""Item of an input. Other items are those of tools of OpenAI, or of models that return their thoughts separately."""
TAGS = frozenset({"message", "function_call", "function_call_output"})


def as_items(value: Any) -> Any:
    """Return a list of items. A text is short for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def chat_messages(items: Sequence[Item]) -> list[ChatMessage]:
    """Return the messages of an input. A reply's text and the function calls after it are one message."""
    messages: list[ChatMessage] = []
    for is_reply, run in groupby(items, key=_is_of_reply):
        some = list(run)
        messages += _replies(some) if is_reply else map(_given, some)
    return messages


def _is_of_reply(item: Item) -> bool:
    return isinstance(item, _FunctionCall) or (isinstance(item, _Message) and item.role == "assistant")


def _replies(items: Iterable[Item]) -> Iterator[ChatMessage]:
    """Yield the replies in adjacent items. Each text begins a new one."""
    text, calls, is_open = "", list[_FunctionCall](), False
    for item in items:
        if isinstance(item, _FunctionCall):
            calls.append(item)
        elif isinstance(item, _Message):
            if is_open:
                yield _reply(text, calls)
            text, calls = item.content.text, []
        is_open = True
    yield _reply(text, calls)


def _reply(text: str, calls: Sequence[_FunctionCall]) -> ChatMessage:
    return ChatMessage(
        role="assistant",
        content=text,
        tool_calls=tuple(ToolCall(name=call.name, arguments=call.arguments) for call in calls),
        call_ids=tuple(call.call_id for call in calls),
    )


def _given(item: Item) -> ChatMessage:
    if isinstance(item, _FunctionOutput):
        return ChatMessage(role="tool", content=item.output.text, images=item.output.images, tool_call_id=item.call_id)
    assert isinstance(item, _Message)
    role = "system" if item.role == "developer" else item.role
    return ChatMessage(role=role, content=item.content.text, images=item.content.images)
