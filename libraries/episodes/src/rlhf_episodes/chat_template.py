"""Find out how a tokenizer's chat template renders conversations, by rendering short ones. Works on text, not ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.prompts.encoder import Refusal, render_chat
from rlhf_core.types import Message, ToolCall

from .contents import Content, images_of, is_image, parts_of
from .contract import Tool
from .renderer_formats import Example, recognise_renderer
from .response_formats import ResponseFormat, format_of_tokens, recognise_reply
from .thinking import markers_of
from .tool_calls import ToolFormat, recognise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHERE = "the tokenizer's chat template"
USER: Message = {"role": "user", "content": "Hello"}
_REPLY = "Zq7Reply"
"""Placeholder for a reply. No template contains it, and it does not contain whitespace that a template could strip."""
_DUMMY: Message = {"role": "assistant", "content": _REPLY}
_EARLIER = "Zq7Earlier"
_CONTENT = "Zq7Content"
_LEFT_OUT = "it leaves the message out"
_CALL_ENDS = ('"}', '<|"|>}<tool_call|>')
"""Closing of a call after its last argument, in JSON and in gemma4's form."""
_PROBE = "zq7_probe"
_RESULT: Message = {"role": "tool", "content": _CONTENT, "tool_call_id": "call00000", "name": _PROBE}
_PROBE_CALL = ToolCall(name=_PROBE, arguments={"text": _CONTENT})
_PROPERTIES = {"text": {"type": "string", "description": "Any text."}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text"]}
_PROBE_FUNCTION = {"name": _PROBE, "description": "Returns its argument.", "parameters": _PARAMETERS}
_PROBE_TOOL: Tool = {"type": "function", "function": _PROBE_FUNCTION}


def _calling(name: str, arguments: object) -> Message:
    """Return a reply that calls a tool."""
    function = {"name": name, "arguments": arguments}
    # Differs from the id of results: for equal ids, some templates write the name of the call, not of the result.
    call = {"type": "function", "id": "call00001", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _probe_of(content: object) -> Content:
    """Return the content of a probe with the same images."""
    if not images_of([{"content": content}]):
        return _CONTENT
    return [part if is_image(part) else {"type": "text", "text": _CONTENT} for part in parts_of(content)]


def shared_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts, in characters.

    Example:
        >>> shared_length("<think>", "<thought>")
        3
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._refusals: dict[tuple[str, bool], str | None] = {}
        self._verified: set[tuple[object, ...]] = set()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prompt: bool = True) -> str:
        """Render the conversation as text, with `prompt` including the generation prompt.

        Raises `DataError` if the tokenizer does not have a template or the template refuses the messages.
        """
        try:
            return self._try(messages, tools, prompt=prompt)
        except Refusal as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"it refuses messages of the roles {roles}: {error}",
                where=WHERE,
                hint="have the environment return messages as in the model's training, usually one user message a turn",
            ) from error

    def after_reply(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Render the text after a reply's content: its closing, `messages`, and the generation prompt.

        Raises `ConfigError` if that text depends on earlier messages, and `DataError` if the template refuses the
        messages.
        """
        reply = self._reply_before(messages)
        text = self._rest(self.render([USER, reply, *messages], tools))
        probes = [{**message, "content": _probe_of(message.get("content"))} for message in messages]
        kind = (*((message.get("role"), str(message["content"])) for message in probes), bool(tools))
        if kind not in self._verified:
            self._verify(probes, tools)
            self._verified.add(kind)
        return text

    def closing(self) -> str:
        """Return the text that closes every reply, last or not."""
        last = self._rest(self.render([USER, _DUMMY], prompt=False))
        return last[: shared_length(last, self._rest(self.render([USER, _DUMMY, USER])))]

    def closing_between(self) -> str:
        """Return the text that closes a reply before another message. The last reply may have a different closing."""
        if not self._rest(self.render([USER, _DUMMY], prompt=False)):
            return ""  # the next message ends it
        opening = self.render([USER])[len(self.render([USER], prompt=False)) :]
        closing = self._rest(self.render([USER, _DUMMY])).removesuffix(opening)
        return closing if self._rest(self.render([USER, _DUMMY, USER])).startswith(closing) else ""

    def refusal(self, role: str, *, first: bool = False) -> str | None:
        """Return why a message of this role cannot follow a reply (or start a conversation, if `first`), or None."""
        if (role, first) not in self._refusals:
            probe: Message = {"role": role, "content": _CONTENT, "tool_call_id": "call00000", "name": _PROBE}
            try:
                text = self._try([probe, USER] if first else [USER, _DUMMY, probe])
                self._refusals[role, first] = None if _CONTENT in text else _LEFT_OUT
            except Refusal as error:
                self._refusals[role, first] = str(error)
        return self._refusals[role, first]

    @cached_property
    def takes_results_of_calls(self) -> bool:
        """Whether a tool's result can follow the message with its call. gpt-oss refuses it after other messages."""
        try:
            text = self._try([USER, _calling(_PROBE, {"text": _REPLY}), _RESULT])
            return _CONTENT in text and any(_REPLY + end in text for end in self._call_ends)  # else it is unknown
        except Refusal:
            return False

    @cached_property
    def _results_need_calls(self) -> bool:
        """Whether results are refused without calls, or depend on earlier ones, as in Hy3, where calls open a group."""
        if self.refusal("tool") is not None:
            return True
        earlier: Message = {"role": "assistant", "content": _EARLIER}
        rows = ([USER, _DUMMY, _RESULT], [USER, earlier, _RESULT, _DUMMY, _RESULT])
        try:
            return len({self._try(messages).partition(_REPLY)[2] for messages in rows}) > 1
        except Refusal:
            return True

    @cached_property
    def _call_ends(self) -> tuple[str, ...]:
        """Closings of a call after its last argument. The template's own is the text before its closing of a reply."""
        called, replied = [USER, _calling(_PROBE, {"text": _REPLY})], [USER, _DUMMY]
        try:
            end, closing = (self._try(messages, prompt=False).partition(_REPLY)[2] for messages in (called, replied))
        except Refusal:
            return _CALL_ENDS
        closing = closing or self._tokenizer.eos_token or ""  # Hy3 closes calls, and replies before other messages
        own = end.removesuffix(closing)
        # It is removed after any reply, so it must not be the beginning of another closing.
        return (own, *_CALL_ENDS) if own and own != end and not closing.startswith(own) else _CALL_ENDS

    @cached_property
    def thinking_markers(self) -> tuple[str, str]:
        """Start and end markers of a thought, as text or special tokens."""
        return markers_of("\n".join([str(self._tokenizer.chat_template), *self._tokenizer.get_added_vocab()]))

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template renders the tools it is given."""
        try:
            return _PROBE in self._try([USER], [_PROBE_TOOL])
        except Refusal:
            return False

    @property
    def call_format(self) -> ToolFormat | None:
        """Format of tool calls, or None if the template does not render tools or writes calls in an unknown format."""
        known, parsed = self._call_formats
        return known if parsed is None else parsed.tools

    @property
    def channels(self) -> ResponseFormat | None:
        """Parser of replies whose parts are in channels, or None if a reply is plain text."""
        parsed = self._call_formats[1]
        return parsed if parsed is not None and parsed.in_channels else None

    @cached_property
    def _call_formats(self) -> tuple[ToolFormat | None, ResponseFormat | None]:
        arguments = dict(_PROBE_CALL.arguments)
        # Some templates require the arguments as an object, others as JSON text.
        for message in (_calling(_PROBE, arguments), _calling(_PROBE, json.dumps(arguments))):
            try:
                without_call = self._try([USER], [_PROBE_TOOL])
                with_call = self._try([USER, message], [_PROBE_TOOL], prompt=False)
            except Refusal:
                continue
            if _PROBE not in without_call:
                continue
            position = shared_length(without_call, with_call)
            # Include the beginning of a tag that starts like the thought at the end of the prompt (`<|` in gemma4).
            rendered = "".join(with_call[:position].rpartition(">")[2].partition("<")[1:]) + with_call[position:]
            if (known := recognise(rendered, _PROBE_CALL)) is not None:
                return known, None
            own = getattr(self._tokenizer, "response_template", None)
            if (parsed := recognise_reply(rendered, _PROBE_CALL, own if isinstance(own, dict) else None)) is not None:
                return None, parsed
            if _PROBE not in rendered:
                return None, format_of_tokens(self._tokenizer.get_added_vocab())
            with suppress(Refusal):
                found = recognise_renderer(self._tokenizer, self._examples(message), rendered, _PROBE_CALL)
                if found is not None:
                    return None, found
        return None, None

    def _examples(self, call: Message) -> list[Example]:
        """Return conversations that identify a family. With a system message they lack the name of a model."""
        opening: list[Message] = [{"role": "system", "content": _EARLIER}, USER]
        result: Message = {**_RESULT, "tool_call_id": "call00001"}
        thought: Message = {**call, "content": _REPLY, "reasoning_content": _EARLIER}
        examples: list[tuple[list[Message], list[Tool]]] = [
            ([*opening, _DUMMY, USER], []),
            ([*opening, call, result, _DUMMY], [_PROBE_TOOL]),
            ([*opening, thought, result, result], [_PROBE_TOOL]),
        ]
        return [(messages, tools, self._try(messages, tools, prompt=False)) for messages, tools in examples]

    def _try(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prompt: bool = True) -> str:
        if not self._tokenizer.chat_template:
            raise DataError(
                "the conversation is a list of chat messages, but the tokenizer does not have a chat template",
                where=WHERE,
                hint="use a chat model, or give prompts and observations as text",
            )
        return render_chat(self._tokenizer, messages, tools, prompt=prompt)

    def _reply_before(self, messages: Sequence[Message], text: str = _REPLY) -> Message:
        """Return a dummy reply that `messages` may follow: one that calls the tool if results need it."""
        first = messages[0] if messages else {}
        if first.get("role") == "tool" and self.takes_results_of_calls and self._results_need_calls:
            return _calling(str(first.get("name")), {"text": text})
        return {"role": "assistant", "content": text}

    def _rest(self, text: str) -> str:
        """Return the text after the dummy reply, or after the call if the dummy is its argument."""
        _, reply, rest = text.partition(_REPLY)
        for end in self._call_ends:
            rest = rest.removeprefix(end)
        if not reply:
            raise ConfigError(
                "it changes the text of an assistant's reply, so turns cannot be appended with it",
                where=WHERE,
                hint="use a tokenizer with another chat_template",
            )
        return rest

    def _verify(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Check that the same reply and messages are rendered alike in a longer conversation.

        Raises `ConfigError` if they are not, and `DataError` if the template silently omits a message.
        """
        for role in {str(message.get("role")) for message in messages}:
            if self.refusal(role) == _LEFT_OUT and not (role == "tool" and self.takes_results_of_calls):
                raise DataError(
                    f"it leaves out messages of the role {role} that follow a reply",
                    where=WHERE,
                    hint="have the environment return user messages instead",
                )
        reply, earlier = self._reply_before(messages), self._reply_before(messages, _EARLIER)
        text = self._rest(self.render([USER, reply, *messages], tools))
        try:
            longer = self._try([USER, earlier, *messages, reply, *messages], tools)
        except Refusal:  # for example of results without their calls
            longer = self.render([USER, earlier, USER, reply, *messages], tools)
        if (other := self._rest(longer)) != text:
            place = shared_length(text, other)
            raise ConfigError(
                "the text between two turns depends on the length of the conversation: "
                f"{text[place:][:60]!r}, later {other[place:][:60]!r}",
                where=WHERE,
                hint="set environment.history: branch, or use a tokenizer with another chat_template",
            )
