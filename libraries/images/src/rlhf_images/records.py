"""Records with images: image parts of chat messages become markers in their text, and references under `images`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.errors import DataError

from .decode import ImageError
from .reading import ImageReader
from .references import KEY, ImageReference, find_markers

PLACEHOLDER = "<image>"
"""Text in a record that stands for the next image of its key `images`."""


def read_images(record: Mapping[str, Any], reader: ImageReader) -> dict[str, Any]:
    """Return a record whose texts contain markers, and whose key `images` has the references of the prompt.

    Chat messages may contain image parts. Other records have the keys `images` or `image`, and `<image>` in the text of
    the prompt where each belongs. Without `<image>`, they are placed before the text of the first user message.

    Args:
        record: A record of a prompt source.
        reader: Reads the images.

    Raises:
        ImageError: An image cannot be used.
        DataError: The record has more or fewer images than `<image>`, or too many.
    """
    listed = _listed(record)
    _check_number(len(listed), reader)
    waiting = [reader.read(each) for each in listed]
    reading = _Reading(reader, waiting)
    copy = {key: value for key, value in record.items() if key not in ("image", KEY)}
    chats = [key for key in ("prompt", "messages") if isinstance(copy.get(key), Sequence)]
    if waiting and not any(_has_placeholder(copy[key]) for key in chats):
        chats = chats[:1]
        copy |= {key: _with_placeholders(copy[key], len(waiting)) for key in chats}
    for key in chats:
        copy[key] = reading.text(copy[key]) if isinstance(copy[key], str) else reading.messages(copy[key])
    if waiting[reading.used :]:
        raise DataError(f"it has {len(waiting)} images, but {reading.used} times {PLACEHOLDER} in its prompt")
    return {**copy, KEY: reading.found}


def _check_number(count: int, reader: ImageReader) -> None:
    if count > reader.limits.max_images:
        problem = f"it has {count} images, at most {reader.limits.max_images} are allowed"
        raise DataError(problem, hint="raise limits.max_images")


class _Reading:
    """The images of one record in the order of its texts."""

    def __init__(self, reader: ImageReader, waiting: Sequence[ImageReference]) -> None:
        self.reader = reader
        self.waiting = waiting
        self.used = 0
        """Number of images of the key `images` that texts have used."""
        self.found: list[ImageReference] = []

    def text(self, text: str) -> str:
        if find_markers(text):
            raise DataError("its text contains a marker of an image, <image:…>", hint="remove it from the text")
        first, *rest = text.split(PLACEHOLDER) if self.waiting else [text]
        for piece in rest:
            if self.used == len(self.waiting):
                raise DataError(f"it has {len(self.waiting)} images, but {PLACEHOLDER} more often in its prompt")
            first += self._add(self.waiting[self.used]) + piece
            self.used += 1
        return first

    def messages(self, messages: Sequence[Any]) -> list[Any]:
        return [
            {**each, "content": self._content(each["content"])}
            if isinstance(each, Mapping) and "content" in each
            else each
            for each in messages
        ]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self.text(content)
        return "".join(map(self._part, content)) if isinstance(content, list | tuple) else content

    def _part(self, part: Any) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return self.text(part["text"])
        if kind in ("image", "image_url"):
            if not any(part.get(key) is not None for key in part if key != "type"):  # the image is in the key `images`
                return self.text(PLACEHOLDER) if self.waiting else self._read(part)
            return self._read(part)
        what = repr(kind) if kind is not None else type(part).__name__
        raise ImageError(f"a part of a chat message is {what}, not text or image", hint="use text and image parts")

    def _read(self, part: Mapping[str, Any]) -> str:
        _check_number(len(self.found) + 1, self.reader)
        return self._add(self.reader.read(part))

    def _add(self, reference: ImageReference) -> str:
        self.found.append(reference)
        return reference.marker


def _listed(record: Mapping[str, Any]) -> Sequence[Any]:
    images = record.get(KEY, record.get("image"))
    if images is None:
        return []
    return images if isinstance(images, list | tuple) else [images]


def _has_placeholder(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return PLACEHOLDER in prompt
    contents = [each.get("content") for each in prompt if isinstance(each, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(each, str) and PLACEHOLDER in each for each in contents) or any(
        isinstance(part, Mapping) and (part.get("type") == "image" or PLACEHOLDER in str(part.get("text")))
        for part in parts
    )


def _with_placeholders(prompt: Any, count: int) -> Any:
    """Put `count` placeholders before a text, or before the content of the first user message."""
    if isinstance(prompt, str):
        return PLACEHOLDER * count + prompt
    messages = list(prompt)
    for place, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            parts = [{"type": "text", "text": PLACEHOLDER * count}]
            joined = PLACEHOLDER * count + content if isinstance(content, str) else [*parts, *(content or [])]
            messages[place] = {**message, "content": joined}
            return messages
    raise DataError("it has images, but no user message")
