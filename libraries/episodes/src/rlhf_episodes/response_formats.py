"""Fallback to `tool_calls.py`: replies parsed by transformers' `parse_response` (see `response_templates.py`)."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_core.types import Message, ToolCall
from rlhf_web.untrusted_json import UnreadableJson, read_json

from .contract import Tool
from .response_parser import ResponseParser, UnreadableReply
from .response_templates import FAMILIES, Family
from .tool_calls import ToolFormat, to_call, unreadable

_TEXTS = ("content", "thinking", "reasoning_content")


class ResponseFormat:
    """Parses the replies of one model family."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._parser = ResponseParser()
        self.tools = ToolFormat(name=family.name, example="", calls=self._calls, tag=family.tag)
        """Format of its tool calls."""

    @property
    def in_channels(self) -> bool:
        """Whether a reply has to be parsed even without calls (`message`)."""
        return self._family.in_channels

    def message(self, text: str) -> Message | None:
        """Convert a reply with its special tokens to a message for the chat template.

        Returns None if it or one of its calls cannot be read. Without that call it would be a different reply.
        """
        try:
            parsed = self._parser.message(self._family.template, text)
        except UnreadableReply:
            return None
        texts = {name: value for name in _TEXTS if isinstance(value := parsed.get(name), str)}
        calls = [_read(call) for call in parsed.get("tool_calls") or []]
        if any(call.error is not None for call in calls):
            return None
        content = texts.pop("content", "")
        # With calls, a thought replaces the content: templates that support both refuse them together.
        if calls and ("thinking" in texts or not self._family.content_precedes_calls):
            content = ""
        return {**texts, **self.tools.message(content, calls)}

    def _calls(self, text: str, tools: Sequence[Tool]) -> Iterator[ToolCall]:
        family = self._family
        if family.tag not in text:
            return
        try:
            calls = self._parser.message(family.template, text, tools).get("tool_calls") or []
        except UnreadableReply as error:
            yield unreadable(str(error))
            return
        num_cut = text.count(family.tag) - text.count(family.end) if family.end else 0
        complete = calls[: len(calls) - num_cut] if num_cut > 0 else calls
        yield from map(_read, complete)
        if num_cut > 0:
            yield unreadable(f"{family.end} is missing")


def recognise_reply(text: str, call: ToolCall, own: Mapping[str, Any] | None) -> ResponseFormat | None:
    """Return the format in which `text` is exactly this call: the tokenizer's `own` template or a known one."""
    own_family = () if own is None else (Family(name="own", tag="", end=None, template=own, in_channels=True),)
    formats = (ResponseFormat(family) for family in (*own_family, *FAMILIES) if family.tag in text)
    return next((form for form in formats if form.tools.parse(text) == (call,)), None)


def format_of_tokens(tokens: Container[str]) -> ResponseFormat | None:
    """Return the format of a tokenizer that has a special token for calls but whose chat template omits calls."""
    families = (family for family in FAMILIES if family.tag.startswith("<|") and family.tag in tokens)
    return next((ResponseFormat(replace(family, in_channels=False)) for family in families), None)


def _read(call: Any) -> ToolCall:
    """Convert a call from the parser, within the bounds of `read_json`."""
    if isinstance(call, dict) and isinstance(reason := call.get("error"), str):
        return unreadable(reason)
    try:
        return to_call(read_json(json.dumps(call))["function"])
    except (UnreadableJson, TypeError, KeyError) as error:
        return unreadable(str(error))
