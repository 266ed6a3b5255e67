"""Messages of a client and replies of the policy, each in the other's terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..types import Message, ToolCall
from .endpoint import ChatMessage
from .tool_calls import ToolFormat


def template_messages(messages: Sequence[ChatMessage], tool_format: Callable[[], ToolFormat]) -> list[Message]:
    """As a chat template takes them: calls as the text that the model would have written."""
    names = {
        call_id: call.name
        for message in messages
        for call_id, call in zip(message.call_ids, message.tool_calls, strict=False)
    }
    found: list[Message] = []
    for message in messages:
        content = message.content
        if message.tool_calls:
            content = tool_format().write(content, message.tool_calls)
        each = {"role": message.role, "content": content}
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
