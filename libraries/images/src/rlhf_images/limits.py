"""Bounds on the images that a run reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core import Section

Format = Literal["png", "jpeg", "webp", "gif", "bmp", "tiff"]


class ImageLimits(Section):
    """Bounds on each image. One that exceeds them is an error of its record, found before the run starts.

    Example:
        >>> ImageLimits(max_pixels=1_000_000).formats
        ['png', 'jpeg', 'webp']
    """

    max_bytes: int = Field(16 * 2**20, ge=64, description="Maximum size of an encoded image, in bytes.")
    max_pixels: int = Field(
        4096 * 4096,
        ge=1,
        le=178_956_970,  # Pillow's own limit
        description="Maximum width x height, checked before decoding. Decoding needs up to 12 bytes per pixel.",
    )
    formats: list[Format] = Field(["png", "jpeg", "webp"], min_length=1, description="Formats that are decoded.")
    max_images: int = Field(16, ge=0, description="Maximum number of images in a prompt.")
