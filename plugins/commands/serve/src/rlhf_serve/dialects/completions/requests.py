"""Requests for OpenAI's chat completions and completions. `replies.py` encodes the answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from rlhf_core.types import ToolCall
from rlhf_episodes import Answer, Call, CallRefused, ChatMessage

from ...contents import Content, read_content
from ...fields import (
    JSON_OBJECT,
    MAX_TOP,
    Arguments,
    Limit,
    MaxTools,
    Object,
    Probability,
    Stops,
    Temperature,
    Text,
    check_text,
    check_texts,
)
from ...forced import ForcedChoice, parallel_refusal
from ...stored import StoredConversations
from ...wire import AnswerRequest, Part, invalid, unsupported
from . import replies

_MAX_CHOICES = 128
"""Maximum number of answers to a request."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    # Extensions of vLLM, SGLang and others.
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
}
_HARMLESS = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "request_id", "priority", "cache_salt"),
    }
)


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool.get("type") != "function" or not (isinstance(name, str) and name):
        raise ValueError('must be {"type": "function", "function": {"name": …, …}}')
    return dict(check_texts(tool))


def _read_content(value: Any) -> Any:
    """Return the content of a message. An image part is `{"type": "image_url", "image_url": {"url": "data:…"}}`."""
    return read_content(value, ("text",), "image_url", _address_of)


def _address_of(part: Mapping[str, Any]) -> Any:
    image = part.get("image_url")
    return image.get("url") if isinstance(image, dict) else image


def _list_prompts(value: Any) -> Any:
    """Return a list of prompts. One prompt is a text or a list of token ids."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and all(type(each) is int for each in value))
    return [value] if is_one else value


_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Prompt = Annotated[
    Annotated[Text, Tag("text")] | Annotated[_TokenIds, Tag("ids")],
    Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
]


class _Function(Part):
    name: Text
    arguments: Arguments = Field(default_factory=dict)


class _ToolCall(Part):
    id: Any = ""
    function: _Function


class _Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content | None, BeforeValidator(_read_content)] = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: Any = None
    function_call: None = None
    """Part of an older protocol, not supported."""

    @model_validator(mode="after")
    def _is_text(self) -> _Message:
        if self.role != "tool":  # a tool may print anything
            check_text(self.content.text if self.content else "")
        if self.role not in ("user", "tool") and self.content and self.content.images:
            raise ValueError(f"a message of the role {self.role} cannot contain images")
        return self

    def message(self) -> ChatMessage:
        calls = (self.role == "assistant" and self.tool_calls) or []
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=self.content.text if self.content else "",
            images=self.content.images if self.content else (),
            tool_calls=tuple(ToolCall(name=call.function.name, arguments=call.function.arguments) for call in calls),
            call_ids=tuple(str(call.id) for call in calls),
            tool_call_id=str(self.tool_call_id) if self.role == "tool" and self.tool_call_id is not None else None,
        )


class _JsonSchema(Part):
    name: Text
    schema_: Object = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class _ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> _ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: is missing")
        return self

    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema of answers, or None if they are free."""
        if self.type == "text":
            return None
        return JSON_OBJECT if self.json_schema is None else self.json_schema.schema_


class _StreamOptions(Part):
    include_usage: bool | None = None


class Body(AnswerRequest):
    """Body of a request: prompt, sampling options and the form of the response."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL
    harmless: ClassVar[frozenset[str]] = _HARMLESS
    tags: ClassVar[frozenset[str]] = frozenset({"text", "ids"})
    is_chat: ClassVar[bool] = False

    n: int | None = Field(None, ge=1, le=_MAX_CHOICES)
    """Number of answers to each prompt."""
    stream_options: _StreamOptions | None = None
    tool_choice: Any = None
    stop: Stops | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63)
    tools: list[Annotated[dict[str, Any], AfterValidator(_check_tool)]] | None = MaxTools

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @abstractmethod
    def extras(self) -> list[str]:
        """Return the names of options in use that only a served model supports."""

    def refusal(self) -> CallRefused | None:
        """Refuse a `tool_choice` of an unsupported type."""
        if self.tool_choice in (None, "auto", "none"):
            return None
        return unsupported("tool_choice", 'omit it, or set it to "auto" or "none"')

    def served_only(self) -> CallRefused | None:
        extras = self.extras()
        return unsupported(extras[0], "omit it") if extras else None

    def answer_body(self, answers: Sequence[Answer], reply_id: str) -> bytes:
        return replies.answer_body(self._form(), answers, reply_id)

    def answer_events(self, answers: Sequence[Answer], reply_id: str) -> Iterator[bytes]:
        return replies.answer_events(self._form(), answers, reply_id)

    def _form(self) -> replies.ReplyForm:
        return replies.ReplyForm(
            is_chat=self.is_chat,
            model=self.model,
            num_choices=self.num_choices,
            streams_usage=self.stream_options is not None and bool(self.stream_options.include_usage),
        )

    def _calls(self, prompt: Mapping[str, Any], first: int) -> list[Call]:
        """Return the calls of one prompt, with the body's options. `first`: number of calls before them."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        sampling: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": limit}
        # A different seed for each, since calls with the same seed must wait for each other.
        seeds = [None if self.seed is None else self.seed + first + index for index in range(self.num_choices)]
        return [Call(**prompt, **sampling, stop=tuple(self.stop or ()), seed=seed) for seed in seeds]


class ChatBody(Body):
    """Body of a request to `/v1/chat/completions`."""

    is_chat: ClassVar[bool] = True

    messages: list[_Message] = Field(min_length=1)
    response_format: _ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @model_validator(mode="after")
    def _has_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    def refusal(self) -> CallRefused | None:
        choice = self._choice
        if choice.is_forced:
            return choice.refusal(self.tools, 'omit it, or set it to "auto", "none", "required" or one function')
        return super().refusal() or parallel_refusal(self.parallel_tool_calls, is_forced=False)

    @property
    def _choice(self) -> ForcedChoice:
        return ForcedChoice.of(self.tool_choice, lambda choice: choice.get("function"))

    def calls(self, stored: StoredConversations) -> list[Call]:
        schema = None if self.response_format is None else self.response_format.schema_of_answer()
        prompt = {
            "messages": tuple(each.message() for each in self.messages),
            "tools": () if self.tool_choice == "none" else tuple(self.tools or ()),
            "forced_tools": self._choice.names(self.tools),
            "several_calls": self._choice.allows_several and self.parallel_tool_calls is not False,
            "answer_schema": schema,
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        return self._calls(prompt, 0)

    def extras(self) -> list[str]:
        return _names(n=self.num_choices > 1, logprobs=bool(self.logprobs))


class TextBody(Body):
    """Body of a request to `/v1/completions`."""

    prompt: Annotated[list[_Prompt], BeforeValidator(_list_prompts), Field(min_length=1, max_length=_MAX_CHOICES)]
    """Texts or token ids."""
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP)] | None, BeforeValidator(lambda top: None if top is False else top)
    ] = None
    echo: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31)

    @model_validator(mode="after")
    def _is_answerable(self) -> TextBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: true")
        if len(self.prompt) * self.num_choices > _MAX_CHOICES:
            raise ValueError(f"n: {self.n} answers to each of {len(self.prompt)} prompts are more than {_MAX_CHOICES}")
        return self

    def calls(self, stored: StoredConversations) -> list[Call]:
        calls: list[Call] = []
        for prompt in self.prompt:
            text = {"text": prompt} if isinstance(prompt, str) else {"token_ids": tuple(prompt)}
            calls += self._calls({**text, "top_logprobs": self.logprobs, "echo": bool(self.echo)}, len(calls))
        return calls

    def extras(self) -> list[str]:
        return _names(n=self.num_choices > 1, logprobs=self.logprobs is not None, echo=bool(self.echo))

    def served_only(self) -> CallRefused | None:
        if (refused := super().served_only()) is not None:
            return refused
        if all(isinstance(prompt, str) for prompt in self.prompt):
            return None
        return invalid("prompt: token ids are not supported here, send text")


def _names(**used: bool) -> list[str]:
    return [name for name, is_used in used.items() if is_used]
