"""Encoding of images for other programs."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def png_bytes(image: Image, *, max_edge: int) -> bytes:
    """Encode an image as PNG, without metadata.

    Args:
        image: A Pillow image. It is not changed.
        max_edge: Maximum width and height in pixels. A larger image is reduced.

    Returns:
        The file's bytes.
    """
    reduced, file = image.copy(), BytesIO()
    reduced.thumbnail((max_edge, max_edge))
    reduced.info.clear()
    reduced.save(file, "PNG")
    return file.getvalue()


def image_address(image: Image, *, max_edge: int) -> str:
    """Encode an image as a `data:` address, as chat models on servers take it.

    Args:
        image: A Pillow image. It is not changed.
        max_edge: Maximum width and height in pixels. A larger image is reduced.

    Returns:
        The address.

    Example:
        >>> from PIL import Image
        >>> image_address(Image.new("L", (4, 2)), max_edge=64).startswith("data:image/png")
        True
    """
    return f"data:image/png;base64,{base64.b64encode(png_bytes(image, max_edge=max_edge)).decode()}"
