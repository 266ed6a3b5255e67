"""Formats of tool calls: parsing calls, and describing tools to a model whose template does not render them.

Model output is untrusted: parsing takes linear time, is bounded, and never raises. A call that cannot be parsed becomes
a `ToolCall` without a name, whose `error` can be shown to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rlhf_core.types import Message, ToolCall
from rlhf_web.untrusted_json import UnreadableJson, read_first_json, read_json

from .contract import Tool
from .thinking import split_thought

MAX_CALLS = 32
"""Maximum number of calls read from one reply. If there are more, an extra entry reports that they were skipped."""
MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls."""

    name: str
    """Name in `environment.tool_format`."""
    example: str
    """Example of a call, for the description of the tools."""
    calls: Callable[[str, Sequence[Tool]], Iterator[ToolCall]]
    tag: str
    """Marker before calls."""
    joined: Callable[[Sequence[ToolCall]], str] | None = None
    """Writes calls as a model would, after the content. None if only the chat template can write them."""

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Return the text of a reply with this content followed by the calls."""
        call_text = self.joined(calls) if calls and self.joined else ""
        return f"{content}\n{call_text}" if content and call_text else content or call_text

    def message(self, content: str, calls: Sequence[ToolCall]) -> Message:
        """Return a reply with this content and these calls as a message for the chat template."""
        message: Message = {"role": "assistant", "content": self.write(content, calls)}
        if self.joined is not None or not calls:
            return message
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return {**message, "tool_calls": [{"type": "function", "function": each} for each in functions]}

    def content(self, text: str, calls: Sequence[ToolCall]) -> str:
        """Return the text of a reply before its calls, or the whole text if a call could not be read."""
        if not calls or any(call.error is not None for call in calls):
            return text
        thought, answer = split_thought(text)
        before, tagged, _ = answer.partition(self.tag) if self.tag else (answer, "", "")
        return thought + (before if tagged else "")

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> tuple[ToolCall, ...]:
        """Parse the calls in a reply, in order, ignoring the model's thought. Never raises.

        Args:
            text: The reply, with special tokens.
            tools: Their schemas determine the types of arguments in formats that write values as plain text.

        Example:
            >>> FORMATS["hermes"].parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
            (ToolCall(name='add', arguments={'a': 1}, error=None),)
        """
        calls = tuple(islice(self.calls(split_thought(text)[1], tools), MAX_CALLS + 1))
        if len(calls) > MAX_CALLS:
            return (*calls[:MAX_CALLS], unreadable(f"only the first {MAX_CALLS} calls of a reply are made"))
        return calls

    def describe(self, tools: Sequence[Tool]) -> str:
        """Return a section for the system message that lists the tools and explains how to call them."""
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to help with the user's request.\n\n"
            "These functions are available, each as a JSON schema within <tools></tools>:\n"
            f"<tools>\n{schemas}\n</tools>\n\n"
            f"To call a function, write its name and its arguments as JSON, in this form:\n{self.example}"
        )


def recognise(text: str, call: ToolCall) -> ToolFormat | None:
    """Return the format in which `text` is exactly this call, or None."""
    return next((form for form in FORMATS.values() if form.parse(text) == (call,)), None)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _hermes(text: str, tools: Sequence[Tool] = ()) -> Iterator[ToolCall]:
    """Yield each call between tags. The last closing tag may be missing if the call itself is complete."""
    start = text.find(_OPEN)
    while start >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        try:
            yield to_call(read_json(text[start:end]) if end >= 0 else read_first_json(text, start)[0])
        except UnreadableJson as error:
            yield unreadable(str(error) if end >= 0 else f"{_CLOSE} is missing")
        start = text.find(_OPEN, end) if end >= 0 else -1


_LOOKS_LIKE_CALL = re.compile(r'(?:\[\s*)?\{[^{}\[\]]{0,200}"name"\s*:')


def _json_after(tag: str, opening: str, text: str) -> Iterator[ToolCall]:
    """Yield the calls in JSON objects, or a list of them, after `tag`.

    If decoding dropped the tag, calls may also be the whole reply, which then begins with the bracket `opening`.
    """
    _, tagged, body = text.partition(tag)
    if not tagged:
        body = text.strip()
        if not (body.startswith(opening) and _LOOKS_LIKE_CALL.match(body)):
            return
    place = _next_call(body, 0)
    if tagged and not body.startswith(("{", "["), place):
        yield unreadable(f"no JSON object follows {tag}")
    while body.startswith(("{", "["), place):
        try:
            value, place = read_first_json(body, place)
        except UnreadableJson as error:
            yield unreadable(str(error))
            return
        # An empty list counts as an unreadable call, so that each value yields an entry and their number is bounded.
        yield from map(to_call, value if isinstance(value, list) and value else [value])
        place = _next_call(body, place)


def _next_call(text: str, place: int) -> int:
    """Return the position of the next JSON value, after whitespace and separators."""
    return len(text) - len(text[place:].lstrip(" \t\r\n;,"))


def to_call(value: Any) -> ToolCall:
    """Build a call from `{"name", "arguments" | "parameters"}`. Arguments may be a JSON string, as in OpenAI's API.

    Example:
        >>> to_call({"name": "add", "parameters": '{"a": 1}'})
        ToolCall(name='add', arguments={'a': 1}, error=None)
    """
    if not isinstance(value, dict):
        return unreadable('a call is a JSON object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        return unreadable('"name" has to be the name of a function')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except UnreadableJson as error:
            return unreadable(f'"arguments" of {name}: {error}')
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return unreadable(f'"arguments" of {name} have to be a JSON object')
    return ToolCall(name=name, arguments=arguments)


def unreadable(reason: str) -> ToolCall:
    """Return an unreadable call with the reason, which can be shown to the model."""
    return ToolCall(name="", error=f"The tool call could not be read: {reason}.")


def _written(call: ToolCall, arguments: str = "arguments") -> str:
    return json.dumps({"name": call.name, arguments: dict(call.arguments)}, ensure_ascii=False)


FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat(
            name="hermes",
            example=f'{_OPEN}\n{{"name": <function-name>, "arguments": <arguments-object>}}\n{_CLOSE}',
            calls=_hermes,
            tag=_OPEN,
            joined=lambda calls: "\n".join(f"{_OPEN}\n{_written(call)}\n{_CLOSE}" for call in calls),
        ),
        ToolFormat(
            name="mistral",
            example='[TOOL_CALLS][{"name": <function-name>, "arguments": <arguments-object>}]',
            calls=lambda text, _: _json_after("[TOOL_CALLS]", "[", text),
            tag="[TOOL_CALLS]",
            joined=lambda calls: f"[TOOL_CALLS][{', '.join(map(_written, calls))}]",
        ),
        ToolFormat(
            name="llama3",
            example='{"name": <function-name>, "parameters": <arguments-object>}',
            calls=lambda text, _: _json_after("<|python_tag|>", "{", text),
            tag="<|python_tag|>",
            joined=lambda calls: "; ".join(_written(call, "parameters") for call in calls),
        ),
    )
}
"""Formats by name. `environment.tool_format` is one of these names or `auto`."""
