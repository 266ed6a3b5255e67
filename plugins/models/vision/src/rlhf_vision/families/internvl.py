"""InternVL: an image is split into tiles of one size, each with a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .base import EncodedImages, Family, PixelBatch

if TYPE_CHECKING:
    from PIL.Image import Image


class InternVL(Family):
    """`InternVLForConditionalGeneration` in the form of transformers (repositories that end in `-hf`)."""

    processor_class = "GotOcr2ImageProcessorPil"

    @property
    def placeholder(self) -> str:
        return self.image_token

    def encode(self, images: Sequence[Image]) -> EncodedImages:
        result = self.processed(images)
        tiles = [int(number) for number in result["num_patches"]]
        count = int(self.config.image_seq_length)
        texts = [f"<img>{self.image_token * count * number}</img>" for number in tiles]
        return EncodedImages(texts, result["pixel_values"], torch.tensor([[number] for number in tiles]))

    def arguments(self, batch: PixelBatch) -> Mapping[str, Any]:
        return {"pixel_values": batch.pixels}
