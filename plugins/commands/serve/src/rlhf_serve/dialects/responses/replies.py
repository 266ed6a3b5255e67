"""Responses and streams of OpenAI's Responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_episodes import Answer, ChatMessage

from ...wire import encode, typed_event
from ..openai import token_logprobs


def response_id(reply_id: str) -> str:
    """Return the id of a response, which `previous_response_id` may name."""
    return f"resp_{reply_id}"


def reply_message(answer: Answer, reply_id: str) -> ChatMessage:
    """Return the answer as a message of the conversation."""
    call_ids = tuple(_call_id(reply_id, index) for index in range(len(answer.tool_calls)))
    return ChatMessage(role="assistant", content=answer.text, tool_calls=answer.tool_calls, call_ids=call_ids)


def answer_body(settings: Mapping[str, Any], answer: Answer, reply_id: str) -> bytes:
    """Encode the response to a request.

    Args:
        settings: options of the request that the response repeats.
        answer: the answer to the request's call.
        reply_id: id of the response, unique over all servers.
    """
    return encode(_finished(_begun(settings, answer, reply_id), answer, reply_id))


def answer_events(settings: Mapping[str, Any], answer: Answer, reply_id: str) -> Iterator[bytes]:
    """Yield the response as server-sent events, each item in one piece.

    The arguments are those of `answer_body`.
    """
    begun = _begun(settings, answer, reply_id)
    finished = _finished(begun, answer, reply_id)
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *(event for index, item in enumerate(finished["output"]) for event in _item_events(index, item)),
        {"type": f"response.{finished['status']}", "response": finished},
    ]
    for number, event in enumerate(events):
        yield typed_event({**event, "sequence_number": number})


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
    is_message = item["type"] == "message"
    empty: dict[str, Any] = {"content": []} if is_message else {"arguments": ""}
    begun = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if is_message:
        (part,) = item["content"]
        place["content_index"] = 0
        text, logprobs = part["text"], part["logprobs"]
        empty_part = {**part, "text": "", "logprobs": []}
        yield {"type": "response.content_part.added", **place, "part": empty_part}
        yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": logprobs}
        yield {"type": "response.output_text.done", **place, "text": text, "logprobs": logprobs}
        yield {"type": "response.content_part.done", **place, "part": part}
    else:
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **place, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _begun(settings: Mapping[str, Any], answer: Answer, reply_id: str) -> dict[str, Any]:
    """The response before its first item."""
    return {
        **settings,
        "id": response_id(reply_id),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "rlhf": {"turn": answer.turn, "policy_version": answer.policy_version},
    }


def _finished(begun: Mapping[str, Any], answer: Answer, reply_id: str) -> dict[str, Any]:
    is_cut = answer.finish_reason == "length" and not answer.tool_calls
    status = "incomplete" if is_cut else "completed"
    return {
        **begun,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answer, reply_id, status),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _items(answer: Answer, reply_id: str, status: str) -> list[dict[str, Any]]:
    """The text, unless there are only calls, and then one item per call."""
    items: list[dict[str, Any]] = []
    if answer.text or not answer.tool_calls:
        logprobs = token_logprobs(answer.tokens or ())
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": logprobs}
        head = {"type": "message", "id": f"msg_{reply_id}", "role": "assistant", "status": status}
        items.append({**head, "content": [part]})
    for index, call in enumerate(answer.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{reply_id}_{index}",
                "call_id": _call_id(reply_id, index),
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                "status": "completed",
            }
        )
    return items


def _call_id(reply_id: str, index: int) -> str:
    return f"call_{reply_id}_{index}"
