"""Responses and streams of OpenAI's chat completions and completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.types import ToolCall
from rlhf_episodes import Answer, TokenLogprob

from ...wire import encode
from ..openai import token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """The form of a response."""

    is_chat: bool
    model: str | None
    num_choices: int
    """Number of answers to each prompt."""
    streams_usage: bool
    """Whether a stream ends with token counts."""


def answer_body(form: ReplyForm, answers: Sequence[Answer], reply_id: str) -> bytes:
    """Encode the response to a request.

    Args:
        form: the form of the response.
        answers: the answers to the request's calls.
        reply_id: id of the response, unique over all servers.
    """
    choices = []
    for index, answer in enumerate(answers):
        content = {"message": _reply(answer, _choice_id(reply_id, index))} if form.is_chat else {"text": answer.text}
        choices.append({**content, **_finish(answer, index), "logprobs": _logprobs(form, answer)})
    return encode({**_head(form, answers, reply_id, ""), "choices": choices, "usage": _usage(form, answers)})


def answer_events(form: ReplyForm, answers: Sequence[Answer], reply_id: str) -> Iterator[bytes]:
    """Yield the response as server-sent events: for each complete answer one event with its content and one end event.

    The arguments are those of `answer_body`.
    """
    head = _head(form, answers, reply_id, ".chunk")
    for index, answer in enumerate(answers):
        content, end = _stream_contents(form, answer, _choice_id(reply_id, index))
        logprobs = _logprobs(form, answer)
        yield _event({**head, "choices": [{**content, "index": index, "finish_reason": None, "logprobs": logprobs}]})
        yield _event({**head, "choices": [{**end, **_finish(answer, index), "logprobs": None}]})
    if form.streams_usage:
        yield _event({**head, "choices": [], "usage": _usage(form, answers)})
    yield b"data: [DONE]\n\n"


def _stream_contents(form: ReplyForm, answer: Answer, reply_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of an answer's first event and of its end event."""
    if not form.is_chat:
        return {"text": answer.text}, {"text": ""}
    reply = _reply(answer, reply_id)
    if "tool_calls" in reply:
        reply["tool_calls"] = [{"index": index, **call} for index, call in enumerate(reply["tool_calls"])]
    return {"delta": reply}, {"delta": {}}


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _head(form: ReplyForm, answers: Sequence[Answer], reply_id: str, suffix: str) -> dict[str, Any]:
    kind = f"chat.completion{suffix}" if form.is_chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if form.is_chat else 'cmpl'}-{reply_id}",
        "object": kind,
        "created": int(time.time()),
        "model": form.model,
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


def _choice_id(reply_id: str, index: int) -> str:
    """Prefix of the ids of a choice's tool calls."""
    return f"{reply_id}-{index}" if index else reply_id


def _finish(answer: Answer, index: int) -> dict[str, Any]:
    return {"index": index, "finish_reason": "tool_calls" if answer.tool_calls else answer.finish_reason}


def _logprobs(form: ReplyForm, answer: Answer) -> dict[str, Any] | None:
    if answer.tokens is None:
        return None
    if form.is_chat:
        return {"content": token_logprobs(answer.tokens), "refusal": None}
    offsets, offset = [], 0
    for each in answer.tokens:
        offsets.append(offset)
        # Special tokens and those of a stop text are not in the answer's text.
        offset += len(each.text) if answer.text.startswith(each.text, offset) else 0
    return {
        "tokens": [each.text for each in answer.tokens],
        "token_logprobs": [each.logprob for each in answer.tokens],
        "top_logprobs": [_top_by_text(each) for each in answer.tokens],
        "text_offset": offsets,
    }


def _top_by_text(token: TokenLogprob) -> dict[str, float] | None:
    """The most likely tokens and the token itself. Of tokens with equal text, the most likely one is listed."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in (*token.top, (token.text, token.logprob)):
        found.setdefault(text, logprob)
    return found


def _usage(form: ReplyForm, answers: Sequence[Answer]) -> dict[str, int]:
    """Token counts. A prompt with several answers counts once."""
    prompt = sum(answer.prompt_tokens for answer in answers[:: form.num_choices])
    completion = sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
