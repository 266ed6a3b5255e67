"""OpenAI's chat completions and completions: request bodies to calls, answers to response bodies."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

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
    """Of a body; whether a field that it does not have may be left out is for `read` to say."""

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


class Body(_Given):
    """What a request asks for, and how the answers are to be written."""

    model_config = ConfigDict(extra="allow")
    is_chat: ClassVar[bool] = False

    model: Annotated[str | None, BeforeValidator(lambda given: None if given is None else str(given)[:200])] = None
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

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return isinstance(self.stream_options, dict) and bool(self.stream_options.get("include_usage"))

    @abstractmethod
    def calls(self) -> list[Call]:
        """One for each prompt; a chat has one."""

    def _call(self, **asked: Any) -> Call:
        """A call sampled as the body says, for what is `asked`."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        return Call(**{**sampling, "stop": tuple(self.stop or ()), "max_tokens": limit, **asked})


class ChatBody(Body):
    """Of `/v1/chat/completions`."""

    is_chat: ClassVar[bool] = True

    messages: list[_Message] = Field(min_length=1)

    def calls(self) -> list[Call]:
        tools = () if self.tool_choice == "none" else tuple(self.tools or ())
        return [self._call(messages=tuple(each.message() for each in self.messages), tools=tools)]


class TextBody(Body):
    """Of `/v1/completions`."""

    prompt: Annotated[_Texts, Field(min_length=1, max_length=_MAX_PROMPTS)]
    """Tokens are not taken."""

    def calls(self) -> list[Call]:
        # A seed of its own for each: calls with one seed have to wait for each other.
        seeds = [None if self.seed is None else self.seed + index for index in range(len(self.prompt))]
        return [self._call(text=text, seed=seed) for text, seed in zip(self.prompt, seeds, strict=True)]


BODIES: Mapping[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody}
"""By path."""


def read(body: bytes, kind: type[Body]) -> Body:
    """Raises `CallRefused`, also for a field that would change the answer, and a choice of tools that forces a call."""
    try:
        given = kind.model_validate(_loads(body))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the body"
        told = f"{where}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r:.60})"
        raise CallRefused(400, "invalid_request", told) from error
    except ValueError as error:
        raise CallRefused(400, "invalid_request", f"the body is no JSON: {error}") from error
    if given.tool_choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", 'leave it out, or give "auto" or "none"')
    for name, value in (given.model_extra or {}).items():
        if name not in _HARMLESS and value is not None and value not in _NEUTRAL.get(name, ()):
            raise _unsupported(name, "leave it out")
    return given


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


def answer_body(asked: Body, answers: Sequence[Answer], reply_id: str) -> bytes:
    """All answers, one for each prompt, in one body. reply_id: unique over all servers."""
    choices = []
    for index, answer in enumerate(answers):
        content = {"message": _reply(answer, reply_id)} if asked.is_chat else {"text": answer.text}
        choices.append({**content, **_ended(answer, index)})
    return encode({**_head(asked, answers, reply_id, ""), "choices": choices, "usage": _usage(answers)})


def answer_events(asked: Body, answers: Sequence[Answer], reply_id: str) -> Iterator[bytes]:
    """The answers as server-sent events. Each is known as a whole: one event has all of it, and one its end."""
    head = _head(asked, answers, reply_id, ".chunk")
    for index, answer in enumerate(answers):
        whole, end = _pieces(asked, answer, reply_id)
        yield _event({**head, "choices": [{**whole, "index": index, "finish_reason": None, "logprobs": None}]})
        yield _event({**head, "choices": [{**end, **_ended(answer, index)}]})
    if asked.streams_usage:
        yield _event({**head, "choices": [], "usage": _usage(answers)})
    yield b"data: [DONE]\n\n"


def _pieces(asked: Body, answer: Answer, reply_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a stream's choice, and of that which ends it."""
    if not asked.is_chat:
        return {"text": answer.text}, {"text": ""}
    reply = _reply(answer, reply_id)
    if "tool_calls" in reply:
        reply["tool_calls"] = [{"index": index, **call} for index, call in enumerate(reply["tool_calls"])]
    return {"delta": reply}, {"delta": {}}


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _head(asked: Body, answers: Sequence[Answer], reply_id: str, suffix: str) -> dict[str, Any]:
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


MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
POLICY = "policy"
"""How the model of a run is called; its calls may give it any name."""
