"""OpenAI's chat completions and completions: request bodies to calls, answers to response bodies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rlhf_core.types import ToolCall
from rlhf_episodes import Answer, Call, CallRefused, ChatMessage
from rlhf_web import Refused

_MAX_PROMPTS = 128
_MAX_STOPS = 16
_MAX_TOOLS = 512
_MIN_TEMPERATURE = 1e-8
"""Below it, logits divided by the temperature may overflow."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    # Of vLLM, SGLang and others.
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
"""Fields that would change an answer and are not supported, with the values that change nothing."""
_HARMLESS = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("request_id", "priority", "cache_salt"),
}
"""Fields that change no answer. Any other, known or not, is refused unless it is null."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Calls, and how their answers are written."""

    calls: tuple[Call, ...]
    """One for each prompt; a chat has one."""
    model: str | None
    """The model's name in the request."""
    is_chat: bool
    streams: bool
    streams_usage: bool


def _text(given: str) -> str:
    if not given.isascii() and any("\ud800" <= char <= "\udfff" for char in given):
        raise ValueError("has half of a surrogate pair, which is no text")
    return given


def _json_of_texts(given: Any) -> Any:
    """Check all keys and values of parsed JSON."""
    try:
        _text(json.dumps(given, ensure_ascii=False))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return given


def _arguments(given: Any) -> Any:
    """Of a call, which are JSON in a text; anything else is none."""
    return _json_of_texts(_loads(given)) if isinstance(given, str) and given else {}


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type") != "function" or not (isinstance(name, str) and name):
        raise ValueError('has to be {"type": "function", "function": {"name": …, …}}')
    return dict(_json_of_texts(given))


def _content(given: Any) -> Any:
    """The texts of a list of parts in one."""
    if not isinstance(given, list):
        return given
    parts: list[Any] = [part.get("text") for part in given if isinstance(part, dict) and part.get("type") == "text"]
    if len(parts) < len(given) or not all(isinstance(part, str) for part in parts):
        raise ValueError("has to be a text, or a list of parts of the type text")
    return "".join(parts)


def _temperature(given: float) -> float:
    if 0 < given < _MIN_TEMPERATURE:
        raise ValueError(f"has to be 0, which is greedy, or at least {_MIN_TEMPERATURE}")
    return given


_Text = Annotated[str, Field(min_length=1)]
"""pydantic refuses half of a surrogate pair in it, since it counts characters."""
_Texts = Annotated[list[_Text], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
_Limit = Annotated[int, Field(ge=1, le=2**31)]


class _Given(BaseModel):
    """Of a body; whether a field that it does not have may be left out is for `_asked` to say."""

    model_config = ConfigDict(strict=True)


class _Function(_Given):
    name: _Text
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = {}


class _ToolCall(_Given):
    id: Any = ""
    function: _Function


class _Message(_Given):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: Any = None
    function_call: None = None
    """Of an older protocol."""

    @model_validator(mode="after")
    def _is_text(self) -> _Message:
        if self.role != "tool":  # whose programs may print anything
            _text(self.content or "")
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


class _Body(_Given):
    model: Any = None
    stream: Any = None
    stream_options: Any = None
    tool_choice: Any = None
    stop: Annotated[_Texts, Field(max_length=_MAX_STOPS)] | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=100), AfterValidator(_temperature)] | None = None
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63)
    tools: list[Annotated[dict[str, Any], AfterValidator(_tool)]] | None = Field(None, max_length=_MAX_TOOLS)

    def call(self, **asked: Any) -> Call:
        """A call sampled as the body says, for what is `asked`."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        return Call(**{**sampling, "stop": tuple(self.stop or ()), "max_tokens": limit, **asked})


class _ChatBody(_Body):
    messages: list[_Message] = Field(min_length=1)


class _TextBody(_Body):
    prompt: Annotated[_Texts, Field(min_length=1, max_length=_MAX_PROMPTS)]
    """Tokens are not taken."""


_READ = {*_ChatBody.model_fields, *_TextBody.model_fields}
BodyT = TypeVar("BodyT", bound=_Body)


def read_chat(body: bytes) -> Asked:
    """A body for `/v1/chat/completions`. Raises `CallRefused`."""
    values, given = _read(body, _ChatBody)
    tools = () if given.tool_choice == "none" else tuple(given.tools or ())
    call = given.call(messages=tuple(each.message() for each in given.messages), tools=tools)
    return _asked(values, given, (call,), is_chat=True)


def read_text(body: bytes) -> Asked:
    """A body for `/v1/completions`. Raises `CallRefused`."""
    values, given = _read(body, _TextBody)
    # A seed of its own for each: calls with one seed have to wait for each other.
    seeds = [None if given.seed is None else given.seed + index for index in range(len(given.prompt))]
    calls = tuple(given.call(text=text, seed=seed) for text, seed in zip(given.prompt, seeds, strict=True))
    return _asked(values, given, calls, is_chat=False)


def _read(body: bytes, model: type[BodyT]) -> tuple[dict[str, Any], BodyT]:
    """All values of a body, and those that are read. Raises `CallRefused`."""
    try:
        values = _loads(body)
        return values, model.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the body"
        told = f"{where}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r:.60})"
        raise CallRefused(400, "invalid_request", told) from error
    except ValueError as error:
        raise CallRefused(400, "invalid_request", f"the body is no JSON: {error}") from error


def _asked(values: Mapping[str, Any], given: _Body, calls: tuple[Call, ...], *, is_chat: bool) -> Asked:
    """Raises `CallRefused` for a field that would change the answer, and a choice of tools that forces a call."""
    if given.tool_choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", 'leave it out, or give "auto" or "none"')
    for name, value in values.items():
        if name in _READ or name in _HARMLESS or value is None or value in _NEUTRAL.get(name, ()):
            continue
        raise _unsupported(name, "leave it out")
    options = given.stream_options
    return Asked(
        calls=calls,
        model=None if given.model is None else str(given.model)[:200],
        is_chat=is_chat,
        streams=bool(given.stream),
        streams_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _loads(text: str | bytes) -> Any:
    """Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _unsupported(name: str, hint: str) -> CallRefused:
    return CallRefused(400, "unsupported_parameter", f"{name[:100]} is not supported here: {hint}")


def encode(value: Any) -> bytes:
    """JSON in ASCII: what a model wrote may hold half of a surrogate pair."""
    return json.dumps(value, allow_nan=False).encode()


def error_body(refused: Refused) -> bytes:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return encode({"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}})


def models_body(name: str) -> bytes:
    """The list of models: there is one."""
    return encode({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rlhf"}]})


def answer_body(asked: Asked, answers: Sequence[Answer], reply_id: str) -> bytes:
    """All answers, one for each prompt, in one body. reply_id: unique over all servers."""
    choices = []
    for index, answer in enumerate(answers):
        content = {"message": _reply(answer, reply_id)} if asked.is_chat else {"text": answer.text}
        choices.append({**content, **_ended(answer, index)})
    return encode({**_head(asked, answers, reply_id, ""), "choices": choices, "usage": _usage(answers)})


def answer_events(asked: Asked, answers: Sequence[Answer], reply_id: str) -> Iterator[bytes]:
    """The answers as server-sent events. Each is known as a whole, so all of its text comes in one."""
    head = _head(asked, answers, reply_id, ".chunk")
    for index, answer in enumerate(answers):
        for choice in _chunks(asked, answer, index, reply_id):
            yield _event({**head, "choices": [choice]})
    if asked.streams_usage:
        yield _event({**head, "choices": [], "usage": _usage(answers)})
    yield b"data: [DONE]\n\n"


def _chunks(asked: Asked, answer: Answer, index: int, reply_id: str) -> Iterator[dict[str, Any]]:
    open_choice: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
    if not asked.is_chat:
        yield {"text": answer.text, **open_choice}
        yield {"text": "", **_ended(answer, index)}
        return
    reply = _reply(answer, reply_id)
    calls = [{"index": index, **call} for index, call in enumerate(reply.pop("tool_calls", ()))]
    yield {"delta": {"role": "assistant", "content": ""}, **open_choice}
    if answer.text:
        yield {"delta": {"content": answer.text}, **open_choice}
    if calls:
        yield {"delta": {"tool_calls": calls}, **open_choice}
    yield {"delta": {}, **_ended(answer, index)}


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _head(asked: Asked, answers: Sequence[Answer], reply_id: str, suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if asked.is_chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{reply_id}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
        "rlhf": {"turn": answers[0].turn, "policy_version": answers[0].policy_version},
    }


def _reply(answer: Answer, reply_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["content"] = answer.text or None
        message["tool_calls"] = _written_calls(answer.tool_calls, reply_id)
    return message


def _written_calls(calls: Sequence[ToolCall], reply_id: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{reply_id}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for index, call in enumerate(calls)
    ]


def _ended(answer: Answer, index: int) -> dict[str, Any]:
    reason = "tool_calls" if answer.tool_calls else answer.finish_reason
    return {"index": index, "finish_reason": reason, "logprobs": None}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


READERS: Mapping[str, Callable[[bytes], Asked]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_text,
}
"""Path -> what reads its bodies."""
MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
POLICY = "policy"
"""How the model of a run is called; its calls may give it any name."""
