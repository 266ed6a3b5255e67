"""Conversations of one key by the ids of their responses, for requests that name an earlier response."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from rlhf_episodes import ChatMessage

MAX_RESPONSES = 4096
MAX_BYTES = 2**26
_MESSAGE_BYTES = 256
"""Size of a message without its texts and calls."""
_POINTER_BYTES = 8


class StoredConversations:
    """The conversations of one key that were used last.

    The oldest are dropped beyond `MAX_RESPONSES` or `MAX_BYTES` of memory. A conversation shares its messages with the
    one that it continues, and a message is freed with the last conversation that contains it.
    """

    def __init__(self) -> None:
        """Start without conversations."""
        self._by_id: OrderedDict[str, tuple[ChatMessage, ...]] = OrderedDict()
        self._num_uses: Counter[int] = Counter()
        """Number of stored conversations with a message, by the message's `id`."""
        self._sizes: dict[int, int] = {}
        """Size of each message when it was added, since a text grows when its UTF-8 form is cached."""
        self.num_bytes = 0
        """Memory of all stored conversations."""

    def messages(self, response_id: str) -> tuple[ChatMessage, ...] | None:
        """Return the conversation that ended with a response, its reply included, or None if it is not stored."""
        if response_id in self._by_id:
            self._by_id.move_to_end(response_id)
        return self._by_id.get(response_id)

    def add(self, response_id: str, messages: Sequence[ChatMessage]) -> None:
        """Store a conversation.

        Args:
            response_id: Id of the response.
            messages: The conversation, which ends with the reply. Messages that are stored already should be the same
                objects.
        """
        if response_id in self._by_id:
            self._drop(response_id)
        self._by_id[response_id] = tuple(messages)
        self.num_bytes += _POINTER_BYTES * len(messages)
        for message in messages:
            if not self._num_uses[id(message)]:
                self._sizes[id(message)] = _message_bytes(message)
                self.num_bytes += self._sizes[id(message)]
            self._num_uses[id(message)] += 1
        while self._by_id and (len(self._by_id) > MAX_RESPONSES or self.num_bytes > MAX_BYTES):
            self._drop(next(iter(self._by_id)))

    def _drop(self, response_id: str) -> None:
        messages = self._by_id.pop(response_id)
        self.num_bytes -= _POINTER_BYTES * len(messages)
        for message in messages:
            self._num_uses[id(message)] -= 1
            if not self._num_uses[id(message)]:
                del self._num_uses[id(message)]
                self.num_bytes -= self._sizes.pop(id(message))


def _message_bytes(message: ChatMessage) -> int:
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    values = [message.content, message.images, message.tool_call_id, message.call_ids, calls]
    return _MESSAGE_BYTES + _value_bytes(values)


def _value_bytes(value: Any) -> int:
    """Return the memory of a JSON value, which may be deeply nested."""
    num_bytes, rest = 0, [value]
    while rest:
        each = rest.pop()
        num_bytes += sys.getsizeof(each)
        if isinstance(each, dict):
            rest += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            rest += each
    return num_bytes
