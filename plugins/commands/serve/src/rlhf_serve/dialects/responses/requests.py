"""Requests for OpenAI's Responses and for token counts. `replies.py` encodes the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_episodes import Answer, Call, CallRefused, ChatMessage

from ...fields import MAX_TOP, Checked, Limit, MaxTools, Object, Probability, Temperature, Text, function_tool
from ...stored import StoredConversations
from ...wire import AnswerRequest, CountRequest, Part, WireRequest, encode, unsupported
from . import replies
from .items import TAGS, Item, as_items, chat_messages

_LOGPROBS = "message.output_text.logprobs"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "parallel_tool_calls": (True,),
    "truncation": ("disabled",),
}
_HARMLESS = frozenset(
    {
        *("access_programs", "background_options", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user"),
    }
)


class _Tool(Part):
    type: Literal["function"]
    """Tools of other types are run by OpenAI, or are a part of its models."""
    name: Text
    description: Checked | None = None
    parameters: Object | None = None
    strict: bool | None = None
    """Not enforced. The arguments of a call are those that the model wrote."""
    defer_loading: Literal[False] | None = None


class _TextConfig(Part):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class PromptBody(WireRequest):
    """The prompt of a request."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL
    harmless: ClassVar[frozenset[str]] = _HARMLESS
    tags: ClassVar[frozenset[str]] = TAGS

    input: Annotated[list[Item], BeforeValidator(as_items)] = Field(default_factory=list)
    instructions: Checked | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = MaxTools
    tool_choice: Any = None
    text: _TextConfig | None = None
    reasoning: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_a_prompt(self) -> PromptBody:
        if not self.input and self.instructions is None and self.previous_response_id is None:
            raise ValueError("input: there is nothing to answer")
        return self

    def refusal(self) -> CallRefused | None:
        """Refuse a forced call, an output format, and options of reasoning."""
        if self.tool_choice not in (None, "auto", "none"):
            return unsupported("tool_choice", 'omit it, or set it to "auto" or "none"')
        text = self.text or _TextConfig()
        if text.format not in (None, {"type": "text"}):
            return unsupported("text.format", 'omit it, or set it to {"type": "text"}')
        if text.verbosity not in (None, "medium"):
            return unsupported("text.verbosity", "omit it")
        if (self.reasoning or {}).get("effort") not in (None, "none"):
            return unsupported("reasoning.effort", "omit it")
        return None

    def prompt(self, stored: StoredConversations) -> dict[str, Any]:
        """Return the messages and tools of the call: instructions, the earlier conversation and the input.

        Raises `CallRefused` if the earlier conversation is not stored.
        """
        earlier: tuple[ChatMessage, ...] | None = ()
        if self.previous_response_id is not None:
            earlier = stored.messages(self.previous_response_id)
        if earlier is None:
            message = f"the response {self.previous_response_id!r:.100} is not stored: send the whole conversation"
            raise CallRefused(400, "previous_response_not_found", message)
        system = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        tools = [function_tool(tool.name, tool.description, tool.parameters) for tool in self.tools or ()]
        return {
            "messages": (*system, *earlier, *chat_messages(self.input)),
            "tools": () if self.tool_choice == "none" else tuple(tools),
        }


class ResponsesBody(PromptBody, AnswerRequest):
    """Body of a request to `/v1/responses`."""

    store: bool | None = None
    max_output_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    include: list[str] | None = None
    metadata: Object | None = None

    @model_validator(mode="after")
    def _has_logprobs(self) -> ResponsesBody:
        if self.top_logprobs and not self._with_logprobs:
            raise ValueError(f"top_logprobs needs {_LOGPROBS} in include")
        return self

    def served_only(self) -> CallRefused | None:
        return unsupported(_LOGPROBS, "omit it from include") if self._with_logprobs else None

    def calls(self, stored: StoredConversations) -> list[Call]:
        return [
            Call(
                **self.prompt(stored),
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_logprobs=(self.top_logprobs or 0) if self._with_logprobs else None,
            )
        ]

    def keep(
        self, stored: StoredConversations, calls: Sequence[Call], answers: Sequence[Answer], reply_id: str
    ) -> None:
        if self.store is False:
            return
        conversation = calls[0].messages[0 if self.instructions is None else 1 :]
        reply = replies.reply_message(answers[0], reply_id)
        stored.add(replies.response_id(reply_id), (*conversation, reply))

    def answer_body(self, answers: Sequence[Answer], reply_id: str) -> bytes:
        return replies.answer_body(self._settings(), answers[0], reply_id)

    def answer_events(self, answers: Sequence[Answer], reply_id: str) -> Iterator[bytes]:
        return replies.answer_events(self._settings(), answers[0], reply_id)

    @property
    def _with_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def _settings(self) -> dict[str, Any]:
        """Options that the response repeats."""
        return {
            "model": self.model,
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": True,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "metadata": self.metadata or {},
            "store": self.store is not False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "background": False,
        }


class CountBody(PromptBody, CountRequest):
    """Body of a request to `/v1/responses/input_tokens`."""

    def calls(self, stored: StoredConversations) -> list[Call]:
        return [Call(**self.prompt(stored))]

    def count_body(self, num_tokens: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": num_tokens})
