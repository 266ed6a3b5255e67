"""OpenAI's chat completions and completions: request bodies to calls, answers to response bodies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.types import ToolCall
from rlhf_episodes import Answer, Call, CallRefused, ChatMessage
from rlhf_web import Refused

_MAX_PROMPTS = 128
_MAX_STOPS = 16
_MAX_TOOLS = 512
_MIN_TEMPERATURE = 1e-8
"""Below it, logits divided by the temperature may overflow."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
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
_READ = {
    *("model", "messages", "prompt", "tools", "tool_choice", "stream", "stream_options", "seed"),
    *("stop", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
}
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
    _check_texts(tools, "tools")
    if _tool_choice(values) == "none":
        tools = []
    call = Call(messages=tuple(map(_message, messages)), tools=tuple(tools), **_sampling(values))
    return _asked(values, (call,), is_chat=True)


def read_text(body: bytes) -> Asked:
    """A body for `/v1/completions`. Raises `CallRefused`."""
    values = _object(body)
    prompt = values.get("prompt")
    given = prompt if isinstance(prompt, list) else [prompt]
    prompts = [each for each in given if isinstance(each, str) and each]
    if not 0 < len(prompts) == len(given) <= _MAX_PROMPTS:
        raise _invalid(f"prompt has to be a text, or a list of at most {_MAX_PROMPTS} texts; tokens are not taken")
    for text in prompts:
        _check_text(text, "prompt")
    _tool_choice(values)
    sampling = _sampling(values)
    seed = sampling.pop("seed")
    # A seed of its own for each: calls with one seed have to wait for each other.
    seeds = [None if seed is None else seed + index for index in range(len(prompts))]
    calls = tuple(Call(text=text, seed=each, **sampling) for text, each in zip(prompts, seeds, strict=True))
    return _asked(values, calls, is_chat=False)


def _tool_choice(values: Mapping[str, Any]) -> str:
    """Raises `CallRefused` for a choice that forces a call."""
    choice = values.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", 'leave it out, or give "auto" or "none"')
    return choice or "auto"


def _asked(values: Mapping[str, Any], calls: tuple[Call, ...], *, is_chat: bool) -> Asked:
    for name, value in values.items():
        if name in _READ or name in _HARMLESS or value is None or value in _NEUTRAL.get(name, ()):
            continue
        raise _unsupported(name, "leave it out")
    options, model = values.get("stream_options"), values.get("model")
    return Asked(
        calls=calls,
        model=None if model is None else str(model)[:200],
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
    for text in stops:
        _check_text(text, "stop")
    temperature = _number(values, "temperature", float, 0, 100)
    if temperature is not None and 0 < temperature < _MIN_TEMPERATURE:
        raise _invalid(f"temperature has to be 0, which is greedy, or at least {_MIN_TEMPERATURE}")
    limits = [_number(values, name, int, 1, 2**31) for name in ("max_completion_tokens", "max_tokens")]
    return {
        "stop": tuple(stops),
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "temperature": temperature,
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
    content = _content(given.get("content"))
    if role != "tool":  # whose programs may print anything
        _check_text(content, "content")
    call_id = given.get("tool_call_id")
    return ChatMessage(
        role=role,
        content=content,
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


def _check_text(text: str, name: str) -> None:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise _invalid(f"{name} has half of a surrogate pair, which is no text")


def _check_texts(value: Any, name: str) -> None:
    """Check all keys and values of parsed JSON."""
    try:
        _check_text(json.dumps(value, ensure_ascii=False), name)
    except RecursionError:
        raise _invalid(f"{name} is nested too deeply") from None


def _tool_call(given: Any) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    name = _name_of(function)
    if name is None or not isinstance(function, dict):
        raise _invalid('each of tool_calls has to be {"type": "function", "function": {"name": …, "arguments": …}}')
    _check_text(name, "the name in tool_calls")
    arguments = function.get("arguments")
    try:
        found = _loads(arguments) if isinstance(arguments, str) and arguments else {}
    except ValueError as error:
        raise _invalid(f"the arguments of the call of {name} are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise _invalid(f"the arguments of the call of {name} are no JSON object")
    _check_texts(found, f"the arguments of the call of {name}")
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
