"""Chat templates of image-text models: many accept messages only as lists of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_core.prompts.encoder import prompt_of, render_chat

from .references import find_markers

_PROBE = "rlhf probe"


def render_prompt(record: Mapping[str, Any], tokenizer: Any, plain: str) -> tuple[str, bool]:
    """Render the prompt of a record of `read_images`, with the model's text for each image.

    Args:
        record: The record, whose texts contain markers.
        tokenizer: The model's tokenizer. Its chat template receives text and image parts.
        plain: Text that stands for an image in a prompt that is not a chat.

    Returns:
        The text, and whether a chat template has written it, including special tokens.

    Raises:
        DataError: The record does not have a prompt.
        Refusal: The chat template rejects the messages.
    """
    prompt = prompt_of(record, "")
    if not isinstance(prompt, str):
        return render_chat(tokenizer, [{**each, "content": _parts_of(each["content"])} for each in prompt]), True
    for start, end, _ in reversed(find_markers(prompt)):
        prompt = prompt[:start] + plain + prompt[end:]
    return prompt, False


def accept_text_messages(tokenizer: Any) -> None:
    """Let a tokenizer's chat template accept messages whose content is text, if it accepts only lists of parts.

    Args:
        tokenizer: The tokenizer, changed in place in this process. Saved files are not changed.
    """
    if tokenizer.chat_template and _template_needs_parts(tokenizer):
        tokenizer.apply_chat_template = partial(_with_text_parts, tokenizer)


def _parts_of(content: Any) -> Any:
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


def _template_needs_parts(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template loses or rejects messages whose content is text."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": _PROBE}], tokenize=False)
    except Exception:  # a template is a program that comes with a model
        return True
    return _PROBE not in text


def _with_text_parts(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """Apply a tokenizer's chat template to messages whose text is given as a part."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in conversation
    ]
    return type(tokenizer).apply_chat_template(tokenizer, messages, **options)
