"""OpenAI's chat completions and completions: converts request bodies to calls and answers to response bodies."""

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


def _check_temperature(value: float) -> float:
    if 0 < value < _MIN_TEMPERATURE:
        raise ValueError(f"must be 0, which is greedy, or at least {_MIN_TEMPERATURE}")
    return value


_Text = Annotated[str, Field(min_length=1)]
"""pydantic counts its characters and therefore refuses half of a surrogate pair."""
_Texts = Annotated[list[_Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
_Limit = Annotated[int, Field(ge=1, le=2**31)]


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


class Body(_Part):
    """Body of a request: prompt, sampling options and the form of the response."""

    model_config = ConfigDict(extra="allow")
    is_chat: ClassVar[bool] = False

    model: Annotated[str | None, BeforeValidator(lambda name: None if name is None else str(name)[:200])] = None
    stream: Any = None
    stream_options: Any = None
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
        return isinstance(self.stream_options, dict) and bool(self.stream_options.get("include_usage"))

    @abstractmethod
    def calls(self) -> list[Call]:
        """Return one call per prompt. A chat is one prompt."""

    def _call(self, **fields: Any) -> Call:
        """Return a call with the body's sampling options, completed or replaced by `fields`."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        return Call(**{**sampling, "stop": tuple(self.stop or ()), "max_tokens": limit, **fields})


class ChatBody(Body):
    """Body of a request to `/v1/chat/completions`."""

    is_chat: ClassVar[bool] = True

    messages: list[_Message] = Field(min_length=1)

    def calls(self) -> list[Call]:
        tools = () if self.tool_choice == "none" else tuple(self.tools or ())
        return [self._call(messages=tuple(each.message() for each in self.messages), tools=tools)]


class TextBody(Body):
    """Body of a request to `/v1/completions`."""

    prompt: Annotated[_Texts, Field(min_length=1, max_length=_MAX_PROMPTS)]
    """One or several texts. Token ids are not supported."""

    def calls(self) -> list[Call]:
        # A different seed for each, since calls with the same seed must wait for each other.
        seeds = [None if self.seed is None else self.seed + index for index in range(len(self.prompt))]
        return [self._call(text=text, seed=seed) for text, seed in zip(self.prompt, seeds, strict=True)]


BODIES: Mapping[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody}
"""Body classes by path."""


def read(body: bytes, kind: type[Body]) -> Body:
    """Parse a body.

    Raises `CallRefused` for an invalid body, an unsupported field that would change the answer, or a `tool_choice` that
    forces a call.
    """
    try:
        parsed = kind.model_validate(_loads(body))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the body"
        message = f"{where}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r:.60})"
        raise CallRefused(400, "invalid_request", message) from error
    except ValueError as error:
        raise CallRefused(400, "invalid_request", f"the body is not JSON: {error}") from error
    if parsed.tool_choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", 'omit it, or set it to "auto" or "none"')
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


def encode(value: Any) -> bytes:
    """Encode JSON in ASCII, since text of a model may contain half of a surrogate pair."""
    return json.dumps(value, allow_nan=False).encode()


def error_body(refused: Refused) -> bytes:
    """Encode an error in the form that OpenAI's clients read."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return encode({"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}})


def models_body(name: str) -> bytes:
    """Encode the list of models, which has one entry."""
    return encode({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rlhf"}]})


def answer_body(body: Body, answers: Sequence[Answer], reply_id: str) -> bytes:
    """Encode the response to a request.

    Args:
        body: the request.
        answers: one answer per prompt.
        reply_id: id of the response, unique over all servers.
    """
    choices = []
    for index, answer in enumerate(answers):
        content = {"message": _reply(answer, reply_id)} if body.is_chat else {"text": answer.text}
        choices.append({**content, **_finish(answer, index)})
    return encode({**_head(body, answers, reply_id, ""), "choices": choices, "usage": _usage(answers)})


def answer_events(body: Body, answers: Sequence[Answer], reply_id: str) -> Iterator[bytes]:
    """Yield the response as server-sent events: for each complete answer one event with its content and one end event.

    The arguments are those of `answer_body`.
    """
    head = _head(body, answers, reply_id, ".chunk")
    for index, answer in enumerate(answers):
        content, end = _stream_contents(body, answer, reply_id)
        yield _event({**head, "choices": [{**content, "index": index, "finish_reason": None, "logprobs": None}]})
        yield _event({**head, "choices": [{**end, **_finish(answer, index)}]})
    if body.streams_usage:
        yield _event({**head, "choices": [], "usage": _usage(answers)})
    yield b"data: [DONE]\n\n"


def _stream_contents(body: Body, answer: Answer, reply_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of an answer's first event and of its end event."""
    if not body.is_chat:
        return {"text": answer.text}, {"text": ""}
    reply = _reply(answer, reply_id)
    if "tool_calls" in reply:
        reply["tool_calls"] = [{"index": index, **call} for index, call in enumerate(reply["tool_calls"])]
    return {"delta": reply}, {"delta": {}}


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _head(body: Body, answers: Sequence[Answer], reply_id: str, suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if body.is_chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if body.is_chat else 'cmpl'}-{reply_id}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
        "rlhf": {"turn": answers[0].turn, "policy_version": answers[0].policy_version},
    }


def _reply(answer: Answer, reply_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["content"] = answer.text or None
        message["tool_calls"] = _encode_calls(answer.tool_calls, reply_id)
    return message


def _encode_calls(calls: Sequence[ToolCall], reply_id: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{reply_id}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for index, call in enumerate(calls)
    ]


def _finish(answer: Answer, index: int) -> dict[str, Any]:
    reason = "tool_calls" if answer.tool_calls else answer.finish_reason
    return {"index": index, "finish_reason": reason, "logprobs": None}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


MODELS_PATH = "/v1/models"
HEALTH_PATH = "/health"
POLICY = "policy"
"""Name of the model in a run. Calls may use any name."""
