"""Images of a prompt one by one, for engines with their own copy of the model."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

from rlhf_models import PromptImage

from .families.base import Family
from .image_columns import images_of_rows


def prompt_images(family: Family, is_image: Tensor, columns: Mapping[str, Tensor]) -> tuple[PromptImage, ...]:
    """Return the images of one prompt, and of observations after it.

    Args:
        family: The family of the model.
        is_image: [1, S] bool, True = a token that a feature of an image replaces.
        columns: Name -> [1, ...], the columns of the prompt or row.
    """
    all_pixels, (sizes,) = images_of_rows(columns)
    pixels, places = torch.cat([each for each in all_pixels if len(each)]), is_image[0].nonzero()[:, 0]
    rows = sizes[:, 0].tolist()
    # In each family, an image's number of tokens is proportional to that of its rows.
    parts = places.split([number * len(places) // sum(rows) for number in rows])
    images = []
    for size, own, part in zip(sizes, pixels.split(rows), parts, strict=True):
        first, last = int(part[0]), int(part[-1])
        digest = sha256(f"{tuple(own.shape)}{size.tolist()}".encode() + own.numpy().tobytes()).hexdigest()
        of_size = {name: value[0] for name, value in family.size_arguments(size[None]).items()}
        images.append(PromptImage(first, is_image[0, first : last + 1], family.normalized(own), of_size, digest))
    return tuple(images)
