"""Requests for Anthropic's Messages and for token counts. `replies.py` encodes the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, model_validator

from rlhf_core.types import ToolCall
from rlhf_episodes import Answer, Call, CallRefused, ChatMessage

from ...contents import image_address
from ...fields import (
    Checked,
    Id,
    Limit,
    MaxTools,
    Object,
    Probability,
    Stops,
    Temperature,
    Text,
    function_tool,
)
from ...forced import ForcedChoice
from ...stored import StoredConversations
from ...wire import AnswerRequest, CountRequest, Part, WireRequest, encode, invalid, unsupported
from . import replies

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
    "thinking": ({"type": "disabled"},),
    "top_k": (-1, 0),
}
_HARMLESS = frozenset(
    {
        *("cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id"),
        *("betas", "workspace_id"),
    }
)


def _as_blocks(value: Any) -> Any:
    """Return a list of content blocks. A text is short for one block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _TextBlock(Part):
    type: Literal["text"]
    text: Checked


class _ImageBytes(Part):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str

    @property
    def address(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class _ImageUrl(Part):
    type: Literal["url"]
    url: Annotated[str, AfterValidator(image_address)]

    @property
    def address(self) -> str:
        return self.url


class _ImageBlock(Part):
    type: Literal["image"]
    source: Annotated[_ImageBytes | _ImageUrl, Discriminator("type")]


class _ResultText(Part):
    type: Literal["text"]
    text: str
    """Unlike other texts, it is not checked, since a tool may print anything."""


_ResultBlock = Annotated[_ResultText | _ImageBlock, Discriminator("type")]


class _ToolUse(Part):
    type: Literal["tool_use"]
    id: Id
    name: Text
    input: Object


class _ToolResult(Part):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Annotated[list[_ResultBlock], BeforeValidator(_as_blocks)] | None = None
    is_error: bool | None = None
    """Not shown to the model, since chat templates lack it. The content describes the error."""


_Block = Annotated[_TextBlock | _ImageBlock | _ToolUse | _ToolResult, Discriminator("type")]
_SystemText = Annotated[list[_TextBlock], BeforeValidator(_as_blocks)]


class _Message(Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> _Message:
        allowed = {
            "user": ("text", "image", "tool_result"),
            "assistant": ("text", "tool_use"),
            "system": ("text",),
        }[self.role]
        for block in self.content:
            if block.type not in allowed:
                raise ValueError(f"a message of the role {self.role} cannot contain {block.type}")
        return self


class _Tool(Part):
    type: Literal["custom"] | None = None
    """Tools of other types are run by Anthropic, or are a part of its models."""
    name: Text
    description: Checked | None = None
    input_schema: Object
    defer_loading: Literal[False] | None = None
    input_examples: None = None


class _JsonFormat(Part):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class _OutputConfig(Part):
    format: _JsonFormat | None = None
    effort: None = None


class _ToolChoice(Part):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptBody(WireRequest):
    """The prompt of a request."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL
    harmless: ClassVar[frozenset[str]] = _HARMLESS
    tags: ClassVar[frozenset[str]] = frozenset({"text", "image", "tool_use", "tool_result"})

    messages: list[_Message] = Field(min_length=1)
    system: _SystemText | None = None
    tools: list[_Tool] | None = MaxTools
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None

    def refusal(self) -> CallRefused | None:
        """Refuse a `tool_choice` of an unsupported type, and one that limits calls without forcing one."""
        choice = self._choice
        if choice.is_forced:
            return choice.refusal(self.tools, 'omit it, or set its type to "auto", "none", "any" or "tool"')
        if self._is_single:
            return unsupported("tool_choice.disable_parallel_tool_use", "omit it, or force a call")
        return None

    @property
    def _choice(self) -> ForcedChoice:
        choice = self.tool_choice
        if choice is None or choice.type != "tool":
            return ForcedChoice.of(None if choice is None else choice.type, lambda _: None)
        return ForcedChoice.of(choice.model_dump(), lambda given: given)

    @property
    def _is_single(self) -> bool:
        return self.tool_choice is not None and bool(self.tool_choice.disable_parallel_tool_use)

    def prompt(self) -> dict[str, Any]:
        """Return the messages and tools of the call. Raises `CallRefused` if they are empty."""
        is_hidden = self.tool_choice is not None and self.tool_choice.type == "none"
        tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]
        system = [] if self.system is None else [ChatMessage(role="system", content=_join(self.system))]
        messages = tuple(_chat_messages(self.messages))
        if not messages:
            raise invalid("messages: there is nothing to answer")
        output = self.output_config
        return {
            "messages": (*system, *messages),
            "tools": () if is_hidden else tuple(tools),
            "forced_tools": self._choice.names(tools),
            "several_calls": self._choice.allows_several and not self._is_single,
            "answer_schema": None if output is None or output.format is None else output.format.schema_,
        }


class MessagesBody(PromptBody, AnswerRequest):
    """Body of a request to `/v1/messages`."""

    max_tokens: Limit
    stop_sequences: Stops | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None

    @model_validator(mode="after")
    def _ends_without_reply(self) -> MessagesBody:
        if self.messages[-1].role == "assistant":
            raise ValueError("messages: a reply cannot be prefilled here, so the last message must not be assistant's")
        return self

    def calls(self, stored: StoredConversations) -> list[Call]:
        sampling: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return [Call(**self.prompt(), **sampling, stop=tuple(self.stop_sequences or ()))]

    def answer_body(self, answers: Sequence[Answer], reply_id: str) -> bytes:
        return replies.answer_body(self.model, answers[0], reply_id)

    def answer_events(self, answers: Sequence[Answer], reply_id: str) -> Iterator[bytes]:
        return replies.answer_events(self.model, answers[0], reply_id)


class CountBody(PromptBody, CountRequest):
    """Body of a request to `/v1/messages/count_tokens`."""

    def calls(self, stored: StoredConversations) -> list[Call]:
        return [Call(**self.prompt())]

    def count_body(self, num_tokens: int) -> bytes:
        return encode({"input_tokens": num_tokens})


def _chat_messages(messages: Sequence[_Message]) -> Iterator[ChatMessage]:
    """Yield the conversation in the common form. As in Anthropic's API, adjacent messages of a role are one."""
    for role, run in groupby(messages, key=lambda message: message.role):
        blocks = [block for message in run for block in message.content]
        if role == "assistant":
            yield _reply(blocks)
        else:
            yield from _given(role, blocks)


def _reply(blocks: Sequence[_Block]) -> ChatMessage:
    calls = [block for block in blocks if isinstance(block, _ToolUse)]
    return ChatMessage(
        role="assistant",
        content="".join(block.text for block in blocks if isinstance(block, _TextBlock)),
        tool_calls=tuple(ToolCall(name=call.name, arguments=call.input) for call in calls),
        call_ids=tuple(call.id for call in calls),
    )


def _given(role: str, blocks: Sequence[_Block]) -> Iterator[ChatMessage]:
    """Yield a message for each tool result, and for the text and image blocks before, between and after them."""
    for is_result, run in groupby(blocks, key=lambda block: isinstance(block, _ToolResult)):
        if not is_result:
            yield _seen(role, run)
            continue
        for block in run:
            if isinstance(block, _ToolResult):
                yield replace(_seen("tool", block.content or ()), tool_call_id=block.tool_use_id)


def _seen(role: str, blocks: Iterable[_Block | _ResultBlock]) -> ChatMessage:
    """Return the message of text and image blocks. Adjacent texts are separate paragraphs."""
    content, images = "", list[tuple[int, str]]()
    for is_text, run in groupby(blocks, key=lambda block: isinstance(block, _TextBlock | _ResultText)):
        if is_text:
            content += _join([block for block in run if isinstance(block, _TextBlock | _ResultText)])
            continue
        images += [(len(content), block.source.address) for block in run if isinstance(block, _ImageBlock)]
    return ChatMessage(role=role, content=content, images=tuple(images))


def _join(blocks: Sequence[_TextBlock | _ResultText]) -> str:
    """Join the texts of blocks, which are separate paragraphs."""
    return "\n".join(block.text for block in blocks)
