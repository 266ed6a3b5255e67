"""Idefics3 and SmolVLM: an image is split into tiles, followed by a small copy of the whole image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlhf_images import ImageError

from .base import EncodedImages, Family, PixelBatch

if TYPE_CHECKING:
    from PIL.Image import Image

_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


class Idefics3(Family):
    """`Idefics3ForConditionalGeneration` and `SmolVLMForConditionalGeneration`."""

    processor_class = "Idefics3ImageProcessorPil"

    @property
    def placeholder(self) -> str:
        return self.image_token

    def encode(self, images: Sequence[Image]) -> EncodedImages:
        # One at a time: together, smaller images would be padded, and a padded one has other features.
        each = [self.processed([image], return_row_col_info=True) for image in images]
        vision = self.config.vision_config
        count = self.whole((vision.image_size // vision.patch_size) ** 2 / self.config.scale_factor**2, "the config")
        for result in each:
            if "pixel_attention_mask" in result and not bool(result["pixel_attention_mask"].all()):
                raise ImageError("the image processor pads its tiles, which is not supported")
        grids = [(int(result["rows"][0][0]), int(result["cols"][0][0])) for result in each]
        pixels = [result["pixel_values"][0] for result in each]
        return EncodedImages(
            [self._text(rows, columns, self.image_token * count) for rows, columns in grids],
            torch.cat(pixels),
            torch.tensor([[len(tiles)] for tiles in pixels]),
        )

    @staticmethod
    def _text(rows: int, columns: int, tokens: str) -> str:
        if not rows and not columns:
            return f"{_AROUND}{_WHOLE}{tokens}{_AROUND}"
        tiles = "".join(
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return f"{tiles}\n{_AROUND}{_WHOLE}{tokens}{_AROUND}"

    def arguments(self, batch: PixelBatch) -> Mapping[str, Any]:
        return {"pixel_values": batch.pixels[None]}
