"""OpenAI's chat completions and completions: request bodies to calls, answers to response bodies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.environments import Answer, Call, CallRefused, ChatMessage
from rlhf_core.types import ToolCall

_MAX_STOPS = 16
_MAX_TOOLS = 512
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "functions": (None, []),
    "function_call": (None, "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
"""Fields that would change an answer and are not supported, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A call, and how its answer is written."""

    call: Call
    model: str
    is_chat: bool
    streams: bool
    streams_usage: bool


def read_chat(body: bytes) -> Asked:
    """A body for `/v1/chat/completions`. Raises `CallRefused`."""
    values = _object(body)
    messages = values.get("messages")
    if not (isinstance(messages, list) and messages):
        raise _invalid("messages has to be a list of messages")
    tools = _list(values, "tools", _MAX_TOOLS)
    for tool in tools:
        if not (isinstance(tool, dict) and tool.get("type") == "function" and _name_of(tool.get("function"))):
            raise _invalid('each of tools has to be {"type": "function", "function": {"name": …, …}}')
    call = Call(messages=tuple(map(_message, messages)), tools=tuple(tools), **_sampling(values))
    return _asked(values, call, is_chat=True)


def read_text(body: bytes) -> Asked:
    """A body for `/v1/completions`. Raises `CallRefused`."""
    values = _object(body)
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not (isinstance(prompt, str) and prompt):
        raise _invalid("prompt has to be one text; tokens, and several prompts at once, are not taken")
    return _asked(values, Call(text=prompt, **_sampling(values)), is_chat=False)


def _asked(values: Mapping[str, Any], call: Call, *, is_chat: bool) -> Asked:
    for name, neutral in _NEUTRAL.items():
        if values.get(name) not in neutral:
            raise CallRefused(400, "unsupported_parameter", f"{name} is not supported here: leave it out")
    options = values.get("stream_options")
    return Asked(
        call=call,
        model=str(values.get("model") or "policy")[:200],
        is_chat=is_chat,
        streams=bool(values.get("stream")),
        streams_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `Call` that say how its answer is sampled."""
    stop = values.get("stop")
    stops = [stop] if isinstance(stop, str) else _list(values, "stop", _MAX_STOPS)
    if not all(isinstance(each, str) and each for each in stops):
        raise _invalid("stop has to be a text, or a list of texts")
    limits = [_number(values, name, int, 1, 2**31) for name in ("max_completion_tokens", "max_tokens")]
    return {
        "stop": tuple(stops),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "temperature": _number(values, "temperature", float, 0, 100),
        "top_p": _number(values, "top_p", float, 0, 1),
        "seed": _number(values, "seed", int, -(2**63), 2**63),
    }


def _message(given: Any) -> ChatMessage:
    if not isinstance(given, dict):
        raise _invalid("each of messages has to be an object")
    named = given.get("role")
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        raise _invalid(f"no message has the role {named!r:.100}; one of {', '.join(_ROLES)}")
    if given.get("function_call") is not None:
        raise _invalid("function_call is of an older protocol: use tool_calls")
    calls = given.get("tool_calls") if role == "assistant" else None
    if not isinstance(calls, list | None):
        raise _invalid("tool_calls has to be a list")
    call_id = given.get("tool_call_id")
    return ChatMessage(
        role=role,
        content=_content(given.get("content")),
        tool_calls=tuple(map(_tool_call, calls or ())),
        call_ids=tuple(str(call.get("id", "")) for call in calls or ()),
        tool_call_id=str(call_id) if role == "tool" and call_id is not None else None,
    )


def _content(given: Any) -> str:
    """Text, or the texts of a list of parts."""
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in given
    ):
        return "".join(part["text"] for part in given)
    raise _invalid("content has to be a text, or a list of parts of the type text")


def _tool_call(given: Any) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    name = _name_of(function)
    if name is None or not isinstance(function, dict):
        raise _invalid('each of tool_calls has to be {"type": "function", "function": {"name": …, "arguments": …}}')
    arguments = function.get("arguments")
    try:
        found = _loads(arguments) if isinstance(arguments, str) and arguments else {}
    except ValueError as error:
        raise _invalid(f"the arguments of the call of {name} are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise _invalid(f"the arguments of the call of {name} are no JSON object")
    return ToolCall(name=name, arguments=found)


def _name_of(function: Any) -> str | None:
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _list(values: Mapping[str, Any], name: str, most: int) -> list[Any]:
    found = values.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or len(found) > most:
        raise _invalid(f"{name} has to be a list of at most {most}")
    return found


def _number(values: Mapping[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    found = values.get(name)
    kinds = (int, float) if kind is float else (int,)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, kinds) or not low <= found <= high:
        raise _invalid(f"{name} has to be a number from {low} to {high}")
    return kind(found)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = _loads(body)
    except ValueError as error:
        raise _invalid(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise _invalid("the body has to be a JSON object")
    return found


def _loads(text: str | bytes) -> Any:
    """Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _invalid(message: str) -> CallRefused:
    return CallRefused(400, "invalid_request", message)


def encode(value: Any) -> bytes:
    """JSON in ASCII: what a model wrote may hold half of a surrogate pair."""
    return json.dumps(value, allow_nan=False).encode()


def error_body(refused: CallRefused) -> bytes:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return encode({"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}})


def models_body(name: str) -> bytes:
    """The list of models: there is one."""
    return encode({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rlhf"}]})


def answer_body(asked: Asked, answer: Answer) -> bytes:
    """The whole answer in one body."""
    if asked.is_chat:
        choice = {"message": _reply(answer), **_ended(answer)}
    else:
        choice = {"text": answer.text, **_ended(answer)}
    return encode({**_head(asked, answer, ""), "choices": [choice], "usage": _usage(answer)})


def answer_events(asked: Asked, answer: Answer) -> Iterator[bytes]:
    """The answer as server-sent events. It is known as a whole, so all of its text comes in one."""
    head = _head(asked, answer, ".chunk")
    for choice in _chunks(asked, answer):
        yield _event({**head, "choices": [choice]})
    if asked.streams_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _chunks(asked: Asked, answer: Answer) -> Iterator[dict[str, Any]]:
    open_choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
    if not asked.is_chat:
        yield {"text": answer.text, **open_choice}
        yield {"text": "", **_ended(answer)}
        return
    reply = _reply(answer)
    calls = [{"index": index, **call} for index, call in enumerate(reply.pop("tool_calls", ()))]
    yield {"delta": {"role": "assistant", "content": ""}, **open_choice}
    if answer.text:
        yield {"delta": {"content": answer.text}, **open_choice}
    if calls:
        yield {"delta": {"tool_calls": calls}, **open_choice}
    yield {"delta": {}, **_ended(answer)}


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _head(asked: Asked, answer: Answer, suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if asked.is_chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{answer.turn}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
        "rlhf": {"turn": answer.turn, "policy_version": answer.policy_version},
    }


def _reply(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["content"] = answer.text or None
        message["tool_calls"] = _written_calls(answer.turn, answer.tool_calls)
    return message


def _written_calls(turn: int, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{turn}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for index, call in enumerate(calls)
    ]


def _ended(answer: Answer) -> dict[str, Any]:
    reason = "tool_calls" if answer.tool_calls else answer.finish_reason
    return {"index": 0, "finish_reason": reason, "logprobs": None}


def _usage(answer: Answer) -> dict[str, int]:
    counts = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    return {**counts, "total_tokens": sum(counts.values())}


READERS: Mapping[str, Callable[[bytes], Asked]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_text,
}
"""Path -> what reads its bodies."""
MODELS_PATH = "/v1/models"
