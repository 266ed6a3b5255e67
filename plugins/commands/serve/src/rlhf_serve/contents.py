"""Content of a message: a text, or a list of parts with texts and images."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from .wire import Part

_SCHEMES = ("data:", "http://", "https://")


class Content(Part):
    """Text of a message, and the images in it."""

    text: str
    images: tuple[tuple[int, str], ...] = ()
    """The number of characters before each image, and its address."""


def read_content(
    value: Any, text_types: Collection[str], image_type: str, address_of: Callable[[Mapping[str, Any]], Any]
) -> Any:
    """Return the content of a message, None for None.

    Args:
        value: A text or a list of parts.
        text_types: Values of `type` of text parts.
        image_type: Value of `type` of image parts.
        address_of: Returns the address of an image part.

    Raises:
        ValueError: A part is neither a text nor an image, or an image has another address than data: or http.
    """
    if value is None or isinstance(value, Content):
        return value
    if isinstance(value, str):
        return Content(text=value)
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    text, images = "", list[tuple[int, str]]()
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in text_types and isinstance(part.get("text"), str):
            text += part["text"]
        elif kind == image_type:
            address = address_of(part)
            images.append((len(text), image_address(address)))
        else:
            raise ValueError(f"must be a text, or a list of parts of the types {', '.join((*text_types, image_type))}")
    return Content(text=text, images=tuple(images))


def image_address(value: Any) -> str:
    """Return the address of an image. Raises `ValueError` for a path, or an id of a file of the provider."""
    if not isinstance(value, str) or not value.startswith(_SCHEMES):
        raise ValueError("must be text or images, an image as a data: URL with base64 in the request itself")
    return value
