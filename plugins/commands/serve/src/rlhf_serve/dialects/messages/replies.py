"""Responses, streams and errors of Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_episodes import Answer
from rlhf_web import Refused

from ...wire import encode, typed_event

_ERRORS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Types of errors by HTTP status. Any other one is an `invalid_request_error`."""


def error_body(refused: Refused) -> bytes:
    """Encode an error in the form that Anthropic's clients read, with the code in `details`."""
    message = str(refused)
    if refused.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # programs look for these words, in order to shorten it
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    error = {"type": kind, "message": message, "details": {"error_code": refused.code}}
    return encode({"type": "error", "error": error, "request_id": None})


def models_body(name: str) -> bytes:
    """Encode the list of models, which has one entry."""
    model = {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    model["lifecycle"] = "active"
    return encode({"data": [model], "has_more": False, "first_id": name, "last_id": name})


def answer_body(model: str | None, answer: Answer, reply_id: str) -> bytes:
    """Encode the response to a request.

    Args:
        model: name of the model in the request.
        answer: the answer to the request's call.
        reply_id: id of the response, unique over all servers.
    """
    message = _message(model, answer, reply_id, _blocks(answer, reply_id))
    return encode(message | _stop(answer) | {"usage": _usage(answer, answer.completion_tokens)})


def answer_events(model: str | None, answer: Answer, reply_id: str) -> Iterator[bytes]:
    """Yield the response as server-sent events, each content block in one piece.

    The arguments are those of `answer_body`.
    """
    begun = {"stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
    yield typed_event({"type": "message_start", "message": _message(model, answer, reply_id, []) | begun})
    for index, block in enumerate(_blocks(answer, reply_id)):
        empty: dict[str, Any]
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield typed_event({"type": "content_block_start", "index": index, "content_block": block | empty})
        yield typed_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield typed_event({"type": "content_block_stop", "index": index})
    usage = _usage(answer, answer.completion_tokens)
    yield typed_event({"type": "message_delta", "delta": _stop(answer), "usage": usage})
    yield typed_event({"type": "message_stop"})


def _message(model: str | None, answer: Answer, reply_id: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "rlhf": {"turn": answer.turn, "policy_version": answer.policy_version},
    }


def _blocks(answer: Answer, reply_id: str) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.text, "citations": None}] if answer.text else []
    calls = [
        {"type": "tool_use", "id": f"toolu_{reply_id}_{index}", "name": call.name, "input": dict(call.arguments)}
        for index, call in enumerate(answer.tool_calls)
    ]
    return [*text, *calls]


def _stop(answer: Answer) -> dict[str, Any]:
    if answer.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    reason = "end_turn" if answer.stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text}


def _usage(answer: Answer, output_tokens: int) -> dict[str, Any]:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": answer.prompt_tokens, "output_tokens": output_tokens, **cache}
