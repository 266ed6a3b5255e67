"""Columns with the images of a row."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlhf_core.errors import DataError

PIXELS, SIZES, COUNT = "images_pixels", "images_sizes", "images_tokens"
"""Images of the prompt: pixels before normalization, [rows, ...]. Sizes, [images, k]. Number of image tokens, []."""


def find_image_tokens(is_token: Tensor, attention_mask: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Find the tokens that features of images replace.

    Args:
        is_token: [B, S] bool, True = the id is that of an image token.
        attention_mask: [B, S] bool, True = a real token.
        columns: Name -> [B, ...], the columns of the rows.

    Returns:
        [B, S] bool.

    Raises:
        DataError: A row lacks image tokens of its prompt.
    """
    counts = columns[COUNT]
    is_image = is_token & attention_mask & (is_token.cumsum(-1) <= counts[:, None])
    if bool((is_image.sum(-1) != counts).any()):
        raise DataError(
            "a sequence lacks image tokens of its prompt",
            where="images",
            hint="with images, an environment cannot add tools or messages to the prompt. history must be append",
        )
    return is_image


def images_of_rows(columns: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the images of each row of a batch without padding.

    Args:
        columns: Name -> [B, ...], the columns of the rows.

    Returns:
        For each row: [rows, ...] uint8 pixels, and [images, k] int64 sizes.
    """
    sizes = [each[each[:, 0] > 0] for each in columns[SIZES]]
    pixels = [each[: int(size[:, 0].sum())] for each, size in zip(columns[PIXELS], sizes, strict=True)]
    return pixels, sizes
