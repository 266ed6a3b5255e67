"""The calls of one episode's endpoint, and which earlier call each of them continues.

A call continues an earlier one when its messages begin with that call's messages followed by exactly the reply it gave
(content and tool calls): the sampled ids then stand in for that reply. Any other call opens a branch of its own. A
text continues a text likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_core.errors import ConfigError, DataError, EpisodeError
from rlhf_core.types import Message, ToolCall

from .contract import EpisodeTruncated, Reply
from .endpoint import Answer, Call, CallRefused, ChatMessage
from .episode import Episode
from .row import EpisodeRow, Mark
from .tool_calls import ToolFormat

_OVER = 401, "invalid_api_key", "the episode of this key is over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A call that was answered: where its reply stands, and with what a call begins that continues it."""

    row: EpisodeRow
    end: Mark
    """End of the reply."""
    said: tuple[ChatMessage, ...] | str
    """The call's messages, or its text, and the reply."""

    def begins(self, call: Call) -> bool:
        """Whether the call continues this one."""
        said = call.messages if call.text is None else call.text
        is_alike = isinstance(said, str) == isinstance(self.said, str) and call.tools == self.row.tools
        return is_alike and said[: len(self.said)] == self.said


class Conversations:
    """Answers the calls of one episode (`KeyOwner`)."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._answered: list[Answered] = []
        self._busy: list[EpisodeRow] = []
        """Rows in which the policy is taking a turn."""

    async def answer(self, call: Call) -> Answer:
        episode = self._episode
        if episode.is_over:
            raise CallRefused(*_OVER)
        if episode.remaining_turns < 1:
            raise self._used_up("turns_used_up", f"no turn is left of {episode.rules.options.max_turns}")
        row, before = self._place(call)
        num_prompt_tokens = row.num_tokens
        self._busy.append(row)
        try:
            reply = await episode.sample(row, self._limit(row, call), call.stop)
        except BaseException:
            # As if the call had not been: its client may bring it again.
            if row.own_turns:
                row.take_back(before)
            else:
                episode.forget(row)
            if episode.is_over:
                raise CallRefused(*_OVER) from None
            raise
        finally:
            self._busy = [each for each in self._busy if each is not row]
        return self._told(call, row, reply, num_prompt_tokens)

    def _place(self, call: Call) -> tuple[EpisodeRow, Mark]:
        """The row whose end the call is answered at, and where that stood before."""
        # Of those that it continues, the longest; of equals one that no other has continued yet.
        found = [each for each in self._answered if each.begins(call)]
        earlier = max(found, key=lambda each: (len(each.said), each.row.mark == each.end), default=None)
        episode = self._episode
        try:
            said: Sequence[Message] | str = call.text or ""
            if call.text is None:
                said = template_messages(call.messages, episode.chat.tool_format)
            if earlier is None:
                row = episode.open_text(said) if isinstance(said, str) else episode.open_chat(tuple(said), call.tools)
                return row, row.mark
            row = earlier.row
            is_free = row.mark == earlier.end and not any(each is row for each in self._busy)
            if not is_free:
                row = row.fork(len(episode.rows), earlier.end)
            goes_on = episode.go_on(row, said[len(earlier.said) :] or None)
            if goes_on is row and not is_free:
                episode.add(row)
            return goes_on, earlier.end
        except (DataError, ConfigError, EpisodeError) as error:
            raise CallRefused(400, "invalid_request", error.message) from error

    def _limit(self, row: EpisodeRow, call: Call) -> int:
        try:
            return self._episode.token_limit(row, call.max_tokens)
        except EpisodeTruncated as error:
            raise self._used_up(
                "context_length_exceeded", f"{error}: the conversation has {row.num_tokens} tokens"
            ) from error

    def _used_up(self, code: str, message: str) -> CallRefused:
        self._episode.was_refused = True
        return CallRefused(400, code, message)

    def _told(self, call: Call, row: EpisodeRow, reply: Reply, num_prompt_tokens: int) -> Answer:
        """Remember the reply, and what its client is told of it."""
        message = reply_message(reply.text, reply.tool_calls, call.stop, self._episode.chat.tool_format)
        said = (*call.messages, message) if call.text is None else call.text + before_stop(reply.text, call.stop)
        self._answered.append(Answered(row=row, end=row.mark, said=said))
        return Answer(
            text=message.content,
            tool_calls=message.tool_calls,
            finish_reason=reply.finish_reason,
            prompt_tokens=num_prompt_tokens,
            completion_tokens=len(reply.token_ids),
            turn=reply.turn,
            policy_version=reply.policy_version,
        )


def template_messages(messages: Sequence[ChatMessage], tool_format: Callable[[], ToolFormat]) -> list[Message]:
    """As a chat template takes them: calls as the text that the model would have written."""
    names = {
        call_id: call.name
        for message in messages
        for call_id, call in zip(message.call_ids, message.tool_calls, strict=False)
    }
    found: list[Message] = []
    for message in messages:
        each: dict[str, object] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            each |= tool_format().message(message.content, message.tool_calls)
        if message.tool_call_id is not None:
            each["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                each["name"] = names[message.tool_call_id]
        found.append(each)
    return found


def reply_message(
    text: str, calls: Sequence[ToolCall], stop: Sequence[str], tool_format: Callable[[], ToolFormat]
) -> ChatMessage:
    """The message that a client gets for a reply: its content and the calls that could be read.

    text: as it was decoded. stop: of the call; the text that ended the reply is left out.
    """
    content = tool_format().content(text, calls) if calls else text
    read = tuple(call for call in calls if call.error is None)
    return ChatMessage(role="assistant", content=before_stop(content, stop), tool_calls=read)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the texts that end it."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]
