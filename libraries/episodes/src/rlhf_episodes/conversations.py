"""Calls at an episode's endpoint, each mapped to the branch that it continues.

A call continues an earlier call if its messages start with that call's messages and its exact reply (content and tool
calls). The sampled tokens are then used in place of that reply. Any other call opens a new branch. Plain texts are
handled in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError, DataError, EpisodeError
from rlhf_core.types import Message, ToolCall

from .contents import images_of, is_image
from .contract import EpisodeTruncated, Reply
from .endpoint import Answer, Call, CallRefused, ChatMessage
from .episode import Episode
from .row import EpisodeRow, Mark
from .tool_calls import ToolFormat

if TYPE_CHECKING:
    from rlhf_images import ImageReference

_COUNTS_PER_TURN = 16
_EPISODE_OVER = 401, "invalid_api_key", "the episode of this key is over"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    """An answered call, which later calls may continue."""

    row: EpisodeRow
    end: Mark
    """End of the reply in `row`."""
    history: tuple[ChatMessage, ...] | str
    """The call's messages or text, followed by the reply. Images are digests."""

    def is_continued_by(self, call: Call) -> bool:
        """Whether the call continues this one."""
        history = call.messages if call.text is None else call.text
        is_alike = isinstance(history, str) == isinstance(self.history, str) and call.tools == self.row.tools
        return is_alike and history[: len(self.history)] == self.history


class Conversations:
    """Answers the calls at one episode's endpoint (`KeyOwner`)."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._answered: list[AnsweredCall] = []
        self._busy: list[EpisodeRow] = []
        """Rows in which a turn is being sampled."""
        self._shown: dict[str, ImageReference] = {}
        """Address -> image, of the images that calls contained."""
        self._num_counts = 0
        """Number of calls whose tokens were counted."""

    async def answer(self, call: Call) -> Answer:
        episode = self._episode
        self._check_turns()
        options = await episode.rules.structures.options(call, episode.chat)
        call, past = await self._read(call)
        self._check_turns()  # meanwhile another call may have taken the last turn
        row, before = self._find_row(call, past)
        num_prompt_tokens = row.num_tokens
        self._busy.append(row)
        try:
            reply = await episode.sample(row, self._token_limit(row, call), call.stop, options)
        except BaseException:
            self._undo(row, before)  # since its client may send the call again
            if episode.is_over:
                raise CallRefused(*_EPISODE_OVER) from None
            raise
        finally:
            self._busy = [each for each in self._busy if each is not row]
        return self._record(call, row, reply, num_prompt_tokens)

    def _check_turns(self) -> None:
        episode = self._episode
        if episode.is_over:
            raise CallRefused(*_EPISODE_OVER)
        if episode.remaining_turns < 1:
            raise self._limit_error("turns_used_up", f"no turn is left of {episode.rules.options.max_turns}")

    async def count_tokens(self, call: Call) -> int:
        if self._episode.is_over:
            raise CallRefused(*_EPISODE_OVER)
        if self._num_counts >= (limit := _COUNTS_PER_TURN * self._episode.rules.options.max_turns):
            raise CallRefused(400, "counts_used_up", f"tokens were counted {limit} times, the limit of an episode")
        self._num_counts += 1
        call, past = await self._read(call)
        row, before = self._find_row(call, past)
        num_tokens = row.num_tokens
        self._undo(row, before)
        return num_tokens

    def _undo(self, row: EpisodeRow, before: Mark) -> None:
        """Undo `_find_row`, whose results are the arguments."""
        if row.own_turns:
            row.roll_back(before)
        else:
            self._episode.remove(row)

    async def _read(self, call: Call) -> tuple[Call, Sequence[Message] | str]:
        """Return the call and its text, or its messages for a chat template, with references in place of images.

        In the returned call, digests stand for images.
        """
        if call.text is not None:
            return call, call.text
        self._check_images(call)
        episode = self._episode
        try:
            given = template_messages(call.messages, episode.chat.tool_format)
            opens = not episode.is_prompt(given, call.tools)
            read = await episode.read([self._with_shown(each) for each in given], opens=opens)
        except (DataError, ConfigError, EpisodeError) as error:
            hint = f" ({error.hint})" if isinstance(error, DataError) and error.hint else ""
            raise CallRefused(400, "invalid_request", f"messages: {error.message}{hint}") from error
        except RuntimeError:
            if episode.is_over:
                raise CallRefused(*_EPISODE_OVER) from None
            raise
        assert read is not None and not isinstance(read, str)
        return replace(call, messages=tuple(map(self._with_digests, call.messages, read))), read

    def _check_images(self, call: Call) -> None:
        """Refuse new images if the episode has many: it keeps all until its end, those of refused calls too."""
        episode = self._episode
        sight, max_turns = episode.rules.sight, episode.rules.options.max_turns
        is_new = any(address not in self._shown for each in call.messages for _, address in each.images)
        if sight is None or not is_new:
            return
        if len(episode.seen.references) >= (limit := sight.max_images * (1 + max_turns)):
            problem = f"the episode has {limit} images, its limit, including those of its prompt and of refused calls"
            raise self._limit_error("images_used_up", f"{problem} (raise prompts.limits.max_images)")

    def _with_shown(self, message: Message) -> Message:
        """Return a message with references in place of images that an earlier call contained."""
        if not images_of([message]):
            return message
        parts = [
            {**each, "image": self._shown.get(each["image"], each["image"])} if is_image(each) else each
            for each in message["content"]
        ]
        return {**message, "content": parts}

    def _with_digests(self, message: ChatMessage, read: Message) -> ChatMessage:
        """Return a message with digests in place of its images, and remember their references."""
        if not message.images:
            return message
        images = []
        for (place, address), part in zip(message.images, images_of([read]), strict=True):
            self._shown[address] = part["image"]
            images.append((place, str(part["image"]["sha256"])))
        return replace(message, images=tuple(images))

    def _find_row(self, call: Call, past: Sequence[Message] | str) -> tuple[EpisodeRow, Mark]:
        """Return the row that the call is answered in, with its new messages added, and the row's end before them."""
        # Of the calls that it continues, choose the longest, and prefer one that no other call has continued.
        candidates = [each for each in self._answered if each.is_continued_by(call)]
        earlier = max(candidates, key=lambda each: (len(each.history), each.row.mark == each.end), default=None)
        episode = self._episode
        try:
            if earlier is None:
                row = episode.open_call(past, call.tools)
                return row, row.mark
            row = earlier.row
            is_free = row.mark == earlier.end and not any(each is row for each in self._busy)
            if not is_free:
                row = row.fork(len(episode.rows), earlier.end)
            new = past[len(earlier.history) :]
            continued = episode.continue_row(row, (new if isinstance(new, str) else episode.with_images(new)) or None)
            if continued is row and not is_free:
                episode.add(row)
            return continued, earlier.end
        except (DataError, ConfigError, EpisodeError) as error:
            raise CallRefused(400, "invalid_request", error.message) from error

    def _token_limit(self, row: EpisodeRow, call: Call) -> int:
        try:
            return self._episode.token_limit(row, call.max_tokens)
        except EpisodeTruncated as error:
            problem = f"{error}: the conversation has {row.num_tokens} tokens"
            raise self._limit_error("context_length_exceeded", problem) from error

    def _limit_error(self, code: str, message: str) -> CallRefused:
        self._episode.was_refused = True
        return CallRefused(400, code, message)

    def _record(self, call: Call, row: EpisodeRow, reply: Reply, num_prompt_tokens: int) -> Answer:
        """Record the reply, so that later calls can continue it, and return the answer for the client."""
        content = self._episode.chat.content(reply.token_ids, reply.tool_calls)
        message = reply_message(content, reply.tool_calls, call.stop)
        history = (*call.messages, message) if call.text is None else call.text + before_stop(reply.text, call.stop)
        self._answered.append(AnsweredCall(row=row, end=row.mark, history=history))
        return Answer(
            text=message.content,
            tool_calls=message.tool_calls,
            finish_reason=reply.finish_reason,
            stop_text=first_stop(reply.text, call.stop),
            prompt_tokens=num_prompt_tokens,
            completion_tokens=len(reply.token_ids),
            turn=reply.turn,
            policy_version=reply.policy_version,
        )


def template_messages(messages: Sequence[ChatMessage], tool_format: Callable[[], ToolFormat]) -> list[Message]:
    """Convert a client's messages for a chat template. Tool calls become the text that the model would have written.

    Args:
        messages: The client's conversation.
        tool_format: Returns the format of tool calls. Called only if a message has calls.

    Returns:
        One template message per client message.

    Example:
        >>> from rlhf_episodes.tool_calls import FORMATS
        >>> template_messages([ChatMessage(role="user", content="Hello")], lambda: FORMATS["hermes"])
        [{'role': 'user', 'content': 'Hello'}]
    """
    names = {
        call_id: call.name
        for message in messages
        for call_id, call in zip(message.call_ids, message.tool_calls, strict=False)
    }
    converted: list[Message] = []
    for message in messages:
        each: dict[str, object] = {"role": message.role, "content": _content_of(message)}
        if message.tool_calls:
            each |= tool_format().message(message.content, message.tool_calls)
        if message.tool_call_id is not None:
            each["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                each["name"] = names[message.tool_call_id]
        converted.append(each)
    return converted


def _content_of(message: ChatMessage) -> str | list[Mapping[str, str]]:
    """Return the content of a message: a text or, if it has images, text and image parts."""
    if not message.images:
        return message.content
    parts: list[Mapping[str, str]] = []
    start = 0
    for offset, address in message.images:
        if offset > start:
            parts.append({"type": "text", "text": message.content[start:offset]})
        parts.append({"type": "image", "image": address})
        start = offset
    if start < len(message.content):
        parts.append({"type": "text", "text": message.content[start:]})
    return parts


def reply_message(content: str, calls: Sequence[ToolCall], stop: Sequence[str]) -> ChatMessage:
    """Build the message that a client receives for a reply: its content and its readable tool calls.

    Args:
        content: Text of the reply without readable calls (`ChatFormat.content`).
        calls: Tool calls in the reply. Those with an `error` are left out.
        stop: Stop texts of the request. The first one found ends the content.

    Returns:
        A message of the role `assistant`.

    Example:
        >>> reply_message("Four.END", (), ("END",)).content
        'Four.'
    """
    readable = tuple(call for call in calls if call.error is None)
    return ChatMessage(role="assistant", content=before_stop(content, stop), tool_calls=readable)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop text in it.

    Example:
        >>> before_stop("1 + 1 = 2, 2 + 2 = 4", ("=", ","))
        '1 + 1 '
    """
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


def first_stop(text: str, stop: Sequence[str]) -> str | None:
    """Return the stop text that occurs first in a text, or None.

    Args:
        text: Decoded reply.
        stop: Stop texts.

    Example:
        >>> first_stop("1 + 1 = 2, 2 + 2 = 4", (",", "="))
        '='
    """
    return min((each for each in stop if each in text), key=text.find, default=None)
