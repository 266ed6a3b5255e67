"""Contents of chat messages: a text, or a list of text and image parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.types import Message

IMAGE_TYPES = ("image", "image_url")
"""Values of `type` of image parts."""
_IMAGE_KEYS = ("image", "bytes", "path", "url", "image_url", "base64")
Content = str | list[Mapping[str, Any]]
"""A text, or text and image parts."""


def is_image(part: object) -> bool:
    """Return whether a part of a message is an image.

    Example:
        >>> is_image({"type": "image", "image": "board.png"}), is_image({"type": "text", "text": "Your turn"})
        (True, False)
    """
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def parts_of(content: object) -> list[Any]:
    """Return the content of a message as a list of parts. A text is one part.

    Example:
        >>> parts_of("Your turn")
        [{'type': 'text', 'text': 'Your turn'}]
    """
    return list(content) if isinstance(content, list | tuple) else [{"type": "text", "text": str(content)}]


def images_of(messages: object) -> list[Any]:
    """Return the image parts of messages in order. Empty for a text, or no messages."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return []
    contents = [each.get("content") for each in messages if isinstance(each, Mapping)]
    return [part for content in contents if isinstance(content, list | tuple) for part in content if is_image(part)]


def has_image_parts(value: object) -> bool:
    """Return whether a tool's result is text and image parts. Other lists, such as records with a `type`, are not.

    Example:
        >>> has_image_parts([{"type": "image", "image": "board.png"}]), has_image_parts([{"type": "image", "width": 3}])
        (True, False)
    """
    if not isinstance(value, list | tuple) or not any(map(is_image, value)):
        return False
    return all(
        any(part.get(key) is not None for key in _IMAGE_KEYS)
        if is_image(part)
        else isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in value
    )


def text_of(content: object) -> str:
    """Return the content of a message as text. Images that were read are markers, and others are left out.

    Example:
        >>> text_of([{"type": "text", "text": "Your "}, {"type": "text", "text": "turn"}])
        'Your turn'
    """
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(_text_of_part(part) for part in content)


def _text_of_part(part: object) -> str:
    if is_image(part):
        assert isinstance(part, Mapping)
        return str(getattr(part.get("image"), "marker", ""))
    return str(part.get("text", "")) if isinstance(part, Mapping) else str(part)


def marked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages whose images are markers in their texts."""
    return tuple({**each, "content": text_of(each["content"])} if images_of([each]) else each for each in messages)


def joined(*contents: object) -> Content:
    """Join contents: to a text if all are texts, else to a list of parts.

    Example:
        >>> joined("a", "b"), len(joined("a", [{"type": "image"}]))
        ('ab', 2)
    """
    if all(isinstance(each, str) for each in contents):
        return "".join(map(str, contents))
    return [part for each in contents for part in parts_of(each)]
