"""Write conversations as token ids, turn by turn, for one tokenizer.

A row is a prompt followed by alternating sampled and given ids. Sampled ids are never re-encoded. The ids given between
two turns of the policy come from the chat template, rendered around a dummy reply and encoded separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import Message, ToolCall

from .chat_template import USER, WHERE, ChatTemplate
from .contents import joined
from .contract import Tool
from .renderer_formats import INSTALL
from .reply_content import ids_before_calls
from .tool_calls import FORMATS, ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REMEMBERED = 1024
"""Size of the cache of encoded texts. Environments repeat many texts across episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryCheck:
    """Whether an append-only row equals the template's rendering of the whole conversation."""

    cut_after: frozenset[tuple[str, bool]]
    """(role, thinks): after messages of the role, the template renders earlier replies of this kind differently."""
    error: ConfigError | None
    """The error of `after_reply` if rows cannot be appended to with this template and can only branch."""

    def cuts(self, messages: Sequence[Message], *, thinking: bool) -> bool:
        """Whether earlier replies are rendered differently if `messages` follow.

        Args:
            messages: New messages. Roles that were not checked count as the user's.
            thinking: Whether an earlier reply contains a thought.
        """
        roles = {"tool" if _role(message) == "tool" else "user" for message in messages}
        return any((role, kind) in self.cut_after for role in roles for kind in (False, thinking))


class ChatFormat:
    """Conversations and tools in the format of one tokenizer.

    With `tool_format: auto` the chat template renders tools and calls. If it renders no tools, they are described in a
    system message (in the first user message if the template lacks a system role) and called in Hermes form. Any other
    format is described in the same way, unless it is the template's own. If the template does not render tools' results
    (messages of the role `tool`), they are written as user messages with `<tool_response>`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, tool_format: str = "auto", eos_token_ids: Iterable[int] = ()
    ) -> None:
        """Set up the format of `tokenizer`.

        Args:
            tokenizer: The model's tokenizer.
            tool_format: `environment.tool_format`. An unknown name raises `ConfigError`.
            eos_token_ids: Tokens that end a sampled turn (from the model's generation config), in addition to the
                tokenizer's EOS and the template's end of turn.
        """
        if tool_format not in ("auto", *FORMATS):
            raise ConfigError(
                f"unknown tool format {tool_format!r}",
                where="environment.tool_format",
                hint=f"one of auto, {', '.join(FORMATS)}",
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._wanted_format = tool_format
        self._given_eos = frozenset(eos_token_ids)
        self._encode = lru_cache(maxsize=_REMEMBERED)(self._encode_uncached)
        self._last_check: tuple[tuple[Tool, ...], HistoryCheck] | None = None

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[str, tuple[int, ...]]:
        """Render a conversation that the policy continues, as text and ids.

        Without tools, the result equals a prompt with these messages. For a branch, pass the whole conversation with
        the policy's replies as `reply_message` returns them. The template may drop parts of them. Raises `DataError` if
        the template refuses the messages.
        """
        text = self.rendered(messages, tools)
        return text, self.encoded(text)

    def rendered(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text of `open`. Contents may also be lists of text and image parts."""
        described = self._with_described(messages, tools)
        return self._template.render(self._without_tool_role(described, tools), self._native(tools))

    def encoded(self, text: str) -> tuple[int, ...]:
        """Return the ids of a rendered conversation."""
        return self._encode(text)

    def after_reply(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), sampled_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the ids between a sampled turn and the next one.

        They close the assistant's message (after a sampled EOS without the end of turn, which a turn that was cut or
        ended by a stop text still needs), then contain `messages` and the generation prompt. A cut turn without
        messages continues directly, with no ids between. Raises `DataError` if the template refuses the messages, and
        `ConfigError` if rows cannot be appended to with it.

        Args:
            messages: New messages since the sampled turn.
            tools: The same as at the first turn.
            sampled_ids: The turn that was sampled.
        """
        if not (messages or self._has_ended(sampled_ids)):
            return ()
        return self.encoded_after(self.rendered_after(messages, tools), sampled_ids)

    def rendered_after(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the text after a reply: its closing, `messages`, and the generation prompt.

        Raises the errors of `after_reply`. Contents may also be lists of text and image parts.
        """
        return self._template.after_reply(self._without_tool_role(messages, tools), self._native(tools))

    def encoded_after(self, text: str, sampled_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of a text of `rendered_after`, without those that a sampled reply already contains."""
        ids = self._after(text)
        return ids[self._closed_by(sampled_ids[-1], ids) :] if self._has_ended(sampled_ids) else ids

    def _has_ended(self, sampled_ids: Sequence[int]) -> bool:
        return bool(sampled_ids) and sampled_ids[-1] in self.eos_token_ids

    def reply_message(self, sampled_ids: Sequence[int]) -> Message:
        """Return a sampled reply as a message for the template.

        Its content is the text without special tokens except thinking markers, unless a response parser splits the
        reply into parts. If the prompt opens a thought, the content starts with that opening.
        """
        if (channels := self._template.channels) is not None:
            text = str(self._tokenizer.decode(list(sampled_ids), skip_special_tokens=False))
            parts = channels.message(self._begun_thought + text)
            if parts is not None:
                return parts
        pieces: list[str] = []
        for is_tag, run in groupby(sampled_ids, key=self._thinking_tags.__contains__):
            pieces.append(str(self._tokenizer.decode(list(run), skip_special_tokens=not is_tag)))
        return _reply(self._begun_thought + "".join(pieces))

    def content(self, sampled_ids: Sequence[int], calls: Sequence[ToolCall]) -> str:
        """Return the text of a reply before these calls in it, or its whole text if a call could not be read."""
        text = str(self._tokenizer.decode(list(sampled_ids), skip_special_tokens=True))
        if not calls or any(call.error is not None for call in calls):
            return text
        form, channels = self.tool_format(), self._template.channels
        if (before := ids_before_calls(self._tokenizer, sampled_ids, form.tag)) is not None:
            return str(self._tokenizer.decode(list(before), skip_special_tokens=True))
        if channels is None or form is not channels.tools:
            return form.content(text, calls)
        parts = self.reply_message(sampled_ids)
        return str(parts["content"] or parts.get("thinking") or parts.get("reasoning_content") or "")

    def thinks(self, sampled_ids: Sequence[int]) -> bool:
        """Whether a sampled reply contains a closed thought."""
        return self._template.thinking_markers[1] in str(self._tokenizer.decode(list(sampled_ids)))

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Encode plain text that follows other text, without special tokens and without a leading space."""
        ids = self._after_newline(text) if self._prepends_space else None
        return self._encode(text) if ids is None else ids

    def tool_format(self) -> ToolFormat:
        """Format of tool calls. Raises `ConfigError` if the template writes calls in an unknown form."""
        if self._wanted_format != "auto":
            return FORMATS[self._wanted_format]
        if not self._template.renders_tools:
            return FORMATS["hermes"]
        call_format = self._template.call_format
        if call_format is None:
            raise ConfigError(
                "it renders tools, but writes calls in a form that cannot be read",
                where=WHERE,
                hint=f"set environment.tool_format to one of {', '.join(FORMATS)}, to describe tools in that form, "
                f"or {INSTALL}",
            )
        return call_format

    def check(self, tools: Sequence[Tool] = ()) -> HistoryCheck:
        """Check how the template changes history after user messages and, with tools, after their results.

        The result for the most recent tools is cached. Raises the errors of `open`.
        """
        tools = tuple(tools)
        if self._last_check is None or self._last_check[0] != tools:
            self._last_check = (tools, self._check_history(tools))
        return self._last_check[1]

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The token that ends a reply in the template, or None without such a token or a template."""
        try:
            return self._first_marker(self._after(self._template.closing()))
        except (ConfigError, DataError):  # no template, or one for a single turn
            return None

    @cached_property
    def _end_between_id(self) -> int | None:
        """The token that ends a reply before other messages, if the last reply has a different end."""
        return self._first_marker(self._after(self._template.closing_between()))

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sampled turn. An engine should stop at each of them."""
        tokens = (self._tokenizer.eos_token_id, self.end_of_turn_id)
        return self._given_eos.union(int(token) for token in tokens if token is not None)

    def ends(self, eos_token_ids: frozenset[int]) -> tuple[str, ...]:
        """Return the end of turn as a stop text for engines that do not stop at its token (with base models)."""
        token = self.end_of_turn_id
        return () if token is None or token in eos_token_ids else (str(self._tokenizer.decode([token])),)

    @cached_property
    def _markers(self) -> frozenset[int]:
        """Tokens whose encoding does not depend on the surrounding text."""
        return frozenset(self._tokenizer.added_tokens_decoder) | self._given_eos

    @cached_property
    def _begun_thought(self) -> str:
        """Opening of a thought at the end of each prompt, or an empty text."""
        begin, opened = self._template.thinking_markers[0], self._template.render([USER])
        return opened[opened.rindex(begin) :] if opened.rstrip().endswith(begin) else ""

    @cached_property
    def _thinking_tags(self) -> frozenset[int]:
        """Special tokens to keep in a reply's text, since templates look for them."""
        added = self._tokenizer.added_tokens_decoder.items()
        marks = self._template.thinking_markers  # in gemma4, only the first part of the opening is a token
        special = ((number, token.content) for number, token in added if token.special)
        return frozenset(number for number, text in special if any(mark.startswith(text) for mark in marks))

    @cached_property
    def _prepends_space(self) -> bool:
        """Whether the tokenizer prepends a space to each text, as SentencePiece often does."""
        return self._after_newline("x") not in (None, self._encode("x"))

    def _after_newline(self, text: str) -> tuple[int, ...] | None:
        """Ids of a text after a newline, or None if the two share a token."""
        newline, whole = self._encode("\n"), self._encode("\n" + text)
        return whole[len(newline) :] if whole[: len(newline)] == newline else None

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        # Templates write their special tokens themselves. Tools may return lone surrogates, which cannot be encoded.
        text = text.encode("utf-8", "replace").decode()
        return tuple(self._tokenizer([text], add_special_tokens=False, verbose=False)["input_ids"][0])

    def _after(self, text: str) -> tuple[int, ...]:
        """Ids of a text that follows a reply. A leading special token makes them independent of the reply."""
        ids = self._encode(text)
        return ids if ids and ids[0] in self._markers else self.text_ids(text)

    def _first_marker(self, ids: tuple[int, ...]) -> int | None:
        return next((token for token in ids if token in self._markers), None)

    def _closed_by(self, sampled: int, ids: tuple[int, ...]) -> int:
        """Number of closing ids that the sampled EOS already covers."""
        markers = list(takewhile(self._markers.__contains__, ids))
        if sampled in markers:  # some replies end with two tokens
            return markers.index(sampled) + 1
        first = self._first_marker(ids)
        # Some templates lack an end of turn. Then the token that starts the next message ends a reply.
        ends = (self.end_of_turn_id, self._end_between_id, sampled)
        return ids.index(first) + 1 if first is not None and first in ends else 0

    def _is_native(self) -> bool:
        """Whether the template itself renders tools in the selected format."""
        return self._template.renders_tools and self._template.call_format is self.tool_format()

    def _native(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        return tools if tools and self._is_native() else ()

    def _with_described(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Add a description of the tools to the messages, if the template does not render tools."""
        messages = list(messages)
        if not tools or self._is_native():
            return messages
        text = self.tool_format().describe(tools)
        if messages and _role(messages[0]) == "system":
            return [_add_text(messages[0], text, before=False), *messages[1:]]
        if self._template.refusal("system", first=True) is None:
            return [{"role": "system", "content": text}, *messages]
        place = next((place for place, message in enumerate(messages) if _role(message) == "user"), None)
        if place is None:
            return [{"role": "user", "content": text}, *messages]
        return [*messages[:place], _add_text(messages[place], text, before=True), *messages[place + 1 :]]

    def _without_tool_role(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return the messages with tool results in a form that the chat template accepts.

        If the template renders results in the selected format, they remain `tool` messages, and those without a call
        id receive a placeholder. Otherwise each becomes a user message in `<tool_response>` tags. Results and user
        texts directly after it are merged into that message, since some templates require alternating roles.
        """
        results = [message for message in messages if _role(message) == "tool"]
        if not results:
            return list(messages)
        takes = self._template.refusal("tool") is None or (
            self._template.takes_results_of_calls and all(each.get("name") for each in results)
        )
        if takes and (not tools or self._is_native()):
            # Some templates require the id of the call.
            return [{"tool_call_id": "call00000", **each} if _role(each) == "tool" else each for each in messages]
        merged: list[Message] = []
        after_result = False
        for message in messages:
            is_result = _role(message) == "tool"
            content = message.get("content")
            if is_result:
                content = joined("<tool_response>\n", content, "\n</tool_response>")
            is_merged = after_result and _role(message) in ("tool", "user") and content is not None
            if is_merged:
                merged[-1] = {"role": "user", "content": joined(merged[-1]["content"], "\n", content)}
            else:
                merged.append({"role": "user", "content": content} if is_result else message)
            after_result = is_result or is_merged
        return merged

    def _check_history(self, tools: Sequence[Tool]) -> HistoryCheck:
        begin, end = self._template.thinking_markers
        begin = "" if self._begun_thought else f"{begin}\n"
        thinking = f"{begin}Zq7Thought\n{end}\n\nZq7Answer"
        cut: set[tuple[str, bool]] = set()
        broken: ConfigError | None = None
        for reply, thinks in (("Zq7Answer", False), (thinking, True)):
            for role in ("user", "tool") if tools else ("user",):
                try:
                    is_kept = self._keeps(reply, role, tools)
                except ConfigError as error:
                    broken, is_kept = error, False
                if not is_kept:
                    cut.add((role, thinks))
        return HistoryCheck(cut_after=frozenset(cut), error=broken)

    def _keeps(self, reply: str, role: str, tools: Sequence[Tool]) -> bool:
        """Whether the template renders a conversation as an append-only row."""
        message: Message = {"role": role, "content": "Zq7Next"}
        between = self._template.after_reply(self._without_tool_role([message], tools), self._native(tools))
        row = self.open([USER], tools)[0] + (reply + between) * 2
        answer = _reply(self._begun_thought + reply)
        try:
            return self.open([USER, answer, message, answer, message], tools)[0] == row
        except DataError:
            return False


def chat_format(
    tokenizer: PreTrainedTokenizerBase, *, tool_format: str, history: str, eos_token_ids: Iterable[int] = ()
) -> ChatFormat:
    """Create the format of conversations for a run.

    Args:
        tokenizer: The policy's tokenizer.
        tool_format: Option of the section `environment`.
        history: Option of the section `environment`.
        eos_token_ids: Tokens at which the engine ends a turn.

    Raises:
        ConfigError: The tool format is unknown, or `history` is `append` and the template cannot append to rows.
    """
    chat = ChatFormat(tokenizer, tool_format=tool_format, eos_token_ids=eos_token_ids)
    if tokenizer.chat_template and history == "append" and (error := chat.check().error) is not None:
        raise error
    return chat


def _role(message: Message) -> object:
    return message.get("role")


def _reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _add_text(message: Message, text: str, *, before: bool) -> Message:
    """Add text before or after a message's content, which may be text or a list of parts."""
    content = message["content"]
    if isinstance(content, str):
        text = f"{text}\n\n" if before else f"\n\n{text}"
    return {**message, "content": joined(text, content) if before else joined(content, text)}
