"""Requests for OpenAI's Responses and for token counts. `replies.py` encodes the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_episodes import Answer, Call, CallRefused, ChatMessage

from ...fields import (
    JSON_OBJECT,
    MAX_TOP,
    Checked,
    Limit,
    MaxTools,
    Object,
    Probability,
    Temperature,
    Text,
    function_tool,
)
from ...forced import ForcedChoice, parallel_refusal
from ...stored import StoredConversations
from ...wire import AnswerRequest, CountRequest, Part, WireRequest, encode, unsupported
from . import replies
from .items import TAGS, Item, as_items, chat_messages

_LOGPROBS = "message.output_text.logprobs"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
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


class _Format(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Object | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> _Format:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("schema: is missing")
        return self


class _TextConfig(Part):
    format: _Format | None = None
    verbosity: str | None = None

    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema of answers, or None if they are free."""
        if self.format is None or self.format.type == "text":
            return None
        return self.format.schema_ or JSON_OBJECT


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
    parallel_tool_calls: bool | None = None
    text: _TextConfig | None = None
    reasoning: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_a_prompt(self) -> PromptBody:
        if not self.input and self.instructions is None and self.previous_response_id is None:
            raise ValueError("input: there is nothing to answer")
        return self

    def refusal(self) -> CallRefused | None:
        """Refuse a forced call of an unsupported type, and options of texts and reasoning."""
        choice, text = self._choice, self.text or _TextConfig()
        if choice.is_forced:
            refused = choice.refusal(self.tools, 'omit it, or set it to "auto", "none", "required" or one function')
        else:
            refused = parallel_refusal(self.parallel_tool_calls, is_forced=False)
        if refused is not None:
            return refused
        if text.verbosity not in (None, "medium"):
            return unsupported("text.verbosity", "omit it")
        if (self.reasoning or {}).get("effort") not in (None, "none"):
            return unsupported("reasoning.effort", "omit it")
        return None

    @property
    def _choice(self) -> ForcedChoice:
        return ForcedChoice.of(self.tool_choice, lambda choice: choice)

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
            "forced_tools": self._choice.names(tools),
            "several_calls": self._choice.allows_several and self.parallel_tool_calls is not False,
            "answer_schema": None if self.text is None else self.text.schema_of_answer(),
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

    def _format(self) -> dict[str, Any]:
        found = None if self.text is None else self.text.format
        return {"type": "text"} if found is None else found.model_dump(by_alias=True, exclude_none=True)

    def _settings(self) -> dict[str, Any]:
        """Options that the response repeats."""
        return {
            "model": self.model,
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "metadata": self.metadata or {},
            "store": self.store is not False,
            "text": {"format": self._format()},
            "truncation": "disabled",
            "background": False,
        }


class CountBody(PromptBody, CountRequest):
    """Body of a request to `/v1/responses/input_tokens`."""

    def calls(self, stored: StoredConversations) -> list[Call]:
        return [Call(**self.prompt(stored))]

    def count_body(self, num_tokens: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": num_tokens})
