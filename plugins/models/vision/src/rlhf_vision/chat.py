"""Chat templates of image-text models: many accept messages only as lists of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_images import find_markers

_PROBE = "rlhf probe"


def parts_of(content: Any) -> Any:
    """Return text with markers of images as a list of text and image parts. Other content is unchanged."""
    if not isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    place = 0
    for start, end, _ in find_markers(content):
        parts += [{"type": "text", "text": content[place:start]}] if start > place else []
        parts.append({"type": "image"})
        place = end
    if place < len(content) or not parts:
        parts.append({"type": "text", "text": content[place:]})
    return parts


def templates_need_parts(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template loses or rejects messages whose content is text."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": _PROBE}], tokenize=False)
    except Exception:  # a template is a program that comes with a model
        return True
    return _PROBE not in text


def with_text_parts(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """Apply a tokenizer's chat template to messages whose text is given as a part."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in conversation
    ]
    return type(tokenizer).apply_chat_template(tokenizer, messages, **options)
