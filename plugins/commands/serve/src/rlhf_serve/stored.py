"""Conversations of one key by the ids of their responses, for requests that name an earlier response."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_episodes import ChatMessage

MAX_RESPONSES = 4096
MAX_CHARS = 2**26


@dataclass(frozen=True, slots=True)
class _Stored:
    messages: tuple[ChatMessage, ...]
    num_chars: int
    """Characters of the messages that the response added."""


class StoredConversations:
    """The latest conversations of one key. The oldest is dropped beyond `MAX_RESPONSES` or `MAX_CHARS`."""

    def __init__(self) -> None:
        """Start without conversations."""
        self._by_id: OrderedDict[str, _Stored] = OrderedDict()
        self._num_chars = 0

    def messages(self, response_id: str) -> tuple[ChatMessage, ...] | None:
        """Return the conversation that ended with a response, its reply included, or None if it is not stored."""
        stored = self._by_id.get(response_id)
        return None if stored is None else stored.messages

    def add(self, response_id: str, messages: Sequence[ChatMessage], *, num_new: int) -> None:
        """Store a conversation.

        Args:
            response_id: Id of the response.
            messages: The conversation, which ends with the reply.
            num_new: Number of last messages that no earlier response has stored.
        """
        num_chars = sum(map(_num_chars, messages[-num_new:]))
        if (replaced := self._by_id.pop(response_id, None)) is not None:
            self._num_chars -= replaced.num_chars
        self._by_id[response_id] = _Stored(tuple(messages), num_chars)
        self._num_chars += num_chars
        while len(self._by_id) > 1 and (len(self._by_id) > MAX_RESPONSES or self._num_chars > MAX_CHARS):
            _, dropped = self._by_id.popitem(last=False)
            self._num_chars -= dropped.num_chars


def _num_chars(message: ChatMessage) -> int:
    return len(message.content) + sum(len(str(call.arguments)) for call in message.tool_calls)
