"""Gemma 3: one square picture per image, whose tokens attend to each other in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .base import EncodedImages, Family, PixelBatch, ones

if TYPE_CHECKING:
    from PIL.Image import Image


class Gemma3(Family):
    """`Gemma3ForConditionalGeneration`, without pan and scan."""

    processor_class = "Gemma3ImageProcessorPil"

    @property
    def placeholder(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self.config.boi_token_id))

    def encode(self, images: Sequence[Image]) -> EncodedImages:
        pixels = self.processed(images, do_pan_and_scan=False)["pixel_values"]
        end = self.tokenizer.convert_ids_to_tokens(self.config.eoi_token_id)
        tokens = self.image_token * int(self.config.mm_tokens_per_image)
        text = f"\n\n{self.placeholder}{tokens}{end}\n\n"
        return EncodedImages([text] * len(images), pixels, ones(len(images)))

    def arguments(self, batch: PixelBatch) -> Mapping[str, Any]:
        return {"pixel_values": batch.pixels, "token_type_ids": batch.is_image.long()}

    def text_arguments(self, input_ids: Tensor, attention_mask: Tensor) -> Mapping[str, Any]:
        # Its forward in training mode requires them.
        return {
            **super().text_arguments(input_ids, attention_mask),
            "token_type_ids": input_ids.new_zeros(input_ids.shape),
        }
