"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of an image of any size, with positions in three dimensions (mRoPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import EncodedImages, Family, PixelBatch

if TYPE_CHECKING:
    from PIL.Image import Image


class QwenVL(Family):
    """The model computes positions itself, from the sizes of images and the places of their tokens."""

    processor_class = "Qwen2VLImageProcessorPil"
    pixel_dims = 2
    size_columns = 4

    @property
    def placeholder(self) -> str:
        return self.image_token

    @property
    def plain(self) -> str:
        around = [self.config.vision_start_token_id, self.config.vision_end_token_id]
        start, end = self.tokenizer.convert_ids_to_tokens(around)
        return f"{start}{self.image_token}{end}"

    @property
    def _merge(self) -> int:
        return int(self.config.vision_config.spatial_merge_size)

    def encode(self, images: Sequence[Image]) -> EncodedImages:
        result = self.processed(images)
        grids = result["image_grid_thw"]
        counts = [self.whole(float(grid.prod()) / self._merge**2, "an image") for grid in grids]
        sizes = torch.cat([grids.prod(-1, keepdim=True), grids], dim=1)
        return EncodedImages([self.image_token * count for count in counts], result["pixel_values"], sizes)

    def size_arguments(self, sizes: Tensor) -> Mapping[str, Tensor]:
        return {"image_grid_thw": sizes[:, 1:]}

    def arguments(self, batch: PixelBatch) -> Mapping[str, Any]:
        return {
            "pixel_values": batch.pixels,
            **self.size_arguments(batch.sizes),
            "mm_token_type_ids": batch.is_image.int(),
            "position_ids": None,
        }

    def position_offset(self, sizes: Tensor) -> int:
        grids = sizes[:, 1:]
        tokens = grids.prod(-1) // self._merge**2
        return int((grids[:, 1:].amax(-1) // self._merge - tokens).sum())
