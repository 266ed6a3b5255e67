"""Columns with the images of a row: those of its prompt, which samples share, and those that observations added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_core import Column
from rlhf_core.errors import DataError

PIXELS, SIZES, COUNT = "images_pixels", "images_sizes", "images_tokens"
"""Images of the prompt: pixels before normalization, [rows, ...]. Sizes, [images, k]. Number of image tokens, []."""
OBSERVED_PIXELS, OBSERVED_SIZES, OBSERVED_TOKENS = "observed_pixels", "observed_sizes", "observed_tokens"
"""Images of observations. `OBSERVED_TOKENS` is [observations, 2]: n and k, if the first k image tokens after the first
n tokens of the row are those of the observation's images. An image token that the policy sampled is not counted."""
COLUMNS: Mapping[str, Column] = {
    name: Column(per="prompt", dtype="uint8" if name in (PIXELS, OBSERVED_PIXELS) else "int64", model_input=True)
    for name in (PIXELS, SIZES, COUNT, OBSERVED_PIXELS, OBSERVED_SIZES, OBSERVED_TOKENS)
}


def observed_columns(
    parts: Sequence[tuple[int, Mapping[str, Tensor]]], no_images: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the columns of observations.

    Args:
        parts: For each observation with images, the number of tokens of the row before it, and the columns that a
            prompt with its images would have.
        no_images: The columns of a prompt without images.

    Returns:
        `OBSERVED_PIXELS` [rows, ...] uint8, `OBSERVED_SIZES` [images, k] and `OBSERVED_TOKENS` [observations, 2] int64.
    """
    columns = [each for _, each in parts] or [no_images]
    places = [[start, int(each[COUNT])] for start, each in parts]
    return {
        OBSERVED_PIXELS: joined_rows([each[PIXELS] for each in columns]),
        OBSERVED_SIZES: joined_rows([each[SIZES] for each in columns]),
        OBSERVED_TOKENS: torch.tensor(places, dtype=torch.int64).view(-1, 2),
    }


def joined_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along their first dimension. One tensor is not copied, so that rows share it."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def find_image_tokens(is_token: Tensor, attention_mask: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Find the tokens that features of images replace.

    Args:
        is_token: [B, S] bool, True = the id is that of an image token.
        attention_mask: [B, S] bool, True = a real token.
        columns: Name -> [B, ...], the columns of the rows. Those of observations may be missing.

    Returns:
        [B, S] bool.

    Raises:
        DataError: A row lacks tokens of its images.
    """
    count = columns[COUNT]
    is_image = is_token & (is_token.cumsum(-1) <= count[:, None])
    place = attention_mask.cumsum(-1) - 1
    for observation in columns.get(OBSERVED_TOKENS, count.new_zeros(len(count), 0, 2)).unbind(1):
        later = is_token & (place >= observation[:, :1])
        is_image = is_image | (later & (later.cumsum(-1) <= observation[:, 1:]))
        count = count + observation[:, 1]
    if bool((is_image.sum(-1) != count).any()):
        raise DataError(
            "a sequence lacks tokens of its images",
            where="images",
            hint="report it to the authors of the section or environment that changed the prompt",
        )
    return is_image


def images_of_rows(columns: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the images of each row of a batch without padding, in the order of their tokens.

    Args:
        columns: Name -> [B, ...]. Columns of observations may be missing.

    Returns:
        For each row and, in a row, for prompt and observations: [rows, ...] uint8 pixels. For each row: [images, k]
        int64 sizes.
    """
    pixels, sizes = list[Tensor](), list[Tensor]()
    names = [(PIXELS, SIZES), (OBSERVED_PIXELS, OBSERVED_SIZES)][: 2 if OBSERVED_SIZES in columns else 1]
    for row in range(len(columns[SIZES])):
        found = []
        for of_pixels, of_sizes in names:
            padded = columns[of_sizes][row]
            found.append(padded[padded[:, 0] > 0])
            pixels.append(columns[of_pixels][row][: int(found[-1][:, 0].sum())])
        sizes.append(torch.cat(found))
    return pixels, sizes
