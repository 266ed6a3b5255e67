"""OpenAI's chat completions and completions: converts request bodies to calls. `responses.py` converts the answers."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from rlhf_core.types import ToolCall
from rlhf_episodes import Call, CallRefused, ChatMessage

_MAX_CHOICES = 128
"""Maximum number of answers to a request."""
_MAX_TOP = 20
_MAX_STOPS = 16
_MAX_TOOLS = 512
_MIN_TEMPERATURE = 1e-8
"""Below it, logits divided by the temperature may overflow."""
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
"""Fields that would change an answer and are not supported, with their values without effect."""
_HARMLESS = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("request_id", "priority", "cache_salt"),
}
"""Fields that never change an answer. Any other field, known or not, is refused unless it is null."""


def _check_text(text: str) -> str:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("has half of a surrogate pair, which is not text")
    return text


def _check_texts(value: Any) -> Any:
    """Check all keys and values of parsed JSON."""
    try:
        _check_text(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return value


def _parse_arguments(value: Any) -> Any:
    """Parse the arguments of a call, which are JSON in a text. Anything else becomes empty arguments."""
    return _check_texts(_loads(value)) if isinstance(value, str) and value else {}


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool.get("type") != "function" or not (isinstance(name, str) and name):
        raise ValueError('must be {"type": "function", "function": {"name": …, …}}')
    return dict(_check_texts(tool))


def _join_parts(value: Any) -> Any:
    """Join the texts of a list of parts."""
    if not isinstance(value, list):
        return value
    parts: list[Any] = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
    if len(parts) < len(value) or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be a text, or a list of parts of the type text")
    return "".join(parts)


def _list_prompts(value: Any) -> Any:
    """Return a list of prompts. One prompt is a text or a list of token ids."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and all(type(each) is int for each in value))
    return [value] if is_one else value


def _check_temperature(value: float) -> float:
    if 0 < value < _MIN_TEMPERATURE:
        raise ValueError(f"must be 0, which is greedy, or at least {_MIN_TEMPERATURE}")
    return value


_Text = Annotated[str, Field(min_length=1)]
"""pydantic counts its characters and therefore refuses half of a surrogate pair."""
_Texts = Annotated[list[_Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
_Limit = Annotated[int, Field(ge=1, le=2**31)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Prompt = Annotated[
    Annotated[_Text, Tag("text")] | Annotated[_TokenIds, Tag("ids")],
    Discriminator(lambda value: "ids" if isinstance(value, list) else "text"),
]
_TAGS = ("text", "ids")
"""Parts of the location of a validation error that are not in the body."""


class _Part(BaseModel):
    """Part of a body. Unknown fields are ignored here, and `read` checks those of the body itself."""

    model_config = ConfigDict(strict=True)


class _Function(_Part):
    name: _Text
    arguments: Annotated[dict[str, Any], BeforeValidator(_parse_arguments)] = {}


class _ToolCall(_Part):
    id: Any = ""
    function: _Function


class _Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_join_parts)] = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: Any = None
    function_call: None = None
    """Part of an older protocol, not supported."""

    @model_validator(mode="after")
    def _is_text(self) -> _Message:
        if self.role != "tool":  # a tool may print anything
            _check_text(self.content or "")
        return self

    def message(self) -> ChatMessage:
        calls = (self.role == "assistant" and self.tool_calls) or []
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=self.content or "",
            tool_calls=tuple(ToolCall(name=call.function.name, arguments=call.function.arguments) for call in calls),
            call_ids=tuple(str(call.id) for call in calls),
            tool_call_id=str(self.tool_call_id) if self.role == "tool" and self.tool_call_id is not None else None,
        )


class _StreamOptions(_Part):
    include_usage: bool | None = None


class Body(_Part):
    """Body of a request: prompt, sampling options and the form of the response."""

    model_config = ConfigDict(extra="allow")
    is_chat: ClassVar[bool] = False

    model: Annotated[str | None, BeforeValidator(lambda name: None if name is None else str(name)[:200])] = None
    n: int | None = Field(None, ge=1, le=_MAX_CHOICES)
    """Number of answers to each prompt."""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tool_choice: Any = None
    stop: Annotated[_Texts, Field(max_length=_MAX_STOPS)] | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=100), AfterValidator(_check_temperature)] | None = None
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63)
    tools: list[Annotated[dict[str, Any], AfterValidator(_check_tool)]] | None = Field(None, max_length=_MAX_TOOLS)

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @abstractmethod
    def calls(self) -> list[Call]:
        """Return one call per answer: all those to the first prompt, then to the next. A chat is one prompt."""

    @abstractmethod
    def extras(self) -> list[str]:
        """Return the names of options in use that only a served model supports."""

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
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_TOP)

    @model_validator(mode="after")
    def _has_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    def calls(self) -> list[Call]:
        prompt = {
            "messages": tuple(each.message() for each in self.messages),
            "tools": () if self.tool_choice == "none" else tuple(self.tools or ()),
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
        Annotated[int, Field(ge=0, le=_MAX_TOP)] | None, BeforeValidator(lambda top: None if top is False else top)
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

    def calls(self) -> list[Call]:
        calls: list[Call] = []
        for prompt in self.prompt:
            text = {"text": prompt} if isinstance(prompt, str) else {"token_ids": tuple(prompt)}
            calls += self._calls({**text, "top_logprobs": self.logprobs, "echo": bool(self.echo)}, len(calls))
        return calls

    def extras(self) -> list[str]:
        return _names(n=self.num_choices > 1, logprobs=self.logprobs is not None, echo=bool(self.echo))


def _names(**used: bool) -> list[str]:
    return [name for name, is_used in used.items() if is_used]


BODIES: Mapping[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody}
"""Body classes by path."""


def read(body: bytes, kind: type[Body], *, with_extras: bool) -> Body:
    """Parse a body. `with_extras`: accept options that only a served model supports.

    Raises `CallRefused` for an invalid body, an unsupported field that would change the answer, or a `tool_choice` that
    forces a call.
    """
    try:
        parsed = kind.model_validate(_loads(body))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"] if part not in _TAGS) or "the body"
        message = f"{where}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r:.60})"
        raise CallRefused(400, "invalid_request", message) from error
    except ValueError as error:
        raise CallRefused(400, "invalid_request", f"the body is not JSON: {error}") from error
    if parsed.tool_choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", 'omit it, or set it to "auto" or "none"')
    if not with_extras:
        if extras := parsed.extras():
            raise _unsupported(extras[0], "omit it")
        if isinstance(parsed, TextBody) and not all(isinstance(prompt, str) for prompt in parsed.prompt):
            raise CallRefused(400, "invalid_request", "prompt: token ids are not supported here, send text")
    for name, value in (parsed.model_extra or {}).items():
        if name not in _HARMLESS and value is not None and value not in _NEUTRAL.get(name, ()):
            raise _unsupported(name, "omit it")
    return parsed


def _loads(text: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError`, also for NaN, infinities and deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _unsupported(name: str, hint: str) -> CallRefused:
    return CallRefused(400, "unsupported_parameter", f"{name[:100]} is not supported here: {hint}")


MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
POLICY = "policy"
"""Name of the model in a run. Calls may use any name."""
