"""LLaVA 1.5 and models of its form: one square picture and a fixed number of tokens per image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from .base import EncodedImages, Family, PixelBatch, ones

if TYPE_CHECKING:
    from PIL.Image import Image


class Llava(Family):
    """`LlavaForConditionalGeneration`."""

    processor_class = "CLIPImageProcessorPil"

    @property
    def placeholder(self) -> str:
        return self.image_token

    def encode(self, images: Sequence[Image]) -> EncodedImages:
        pixels = self.processed(images)["pixel_values"]
        vision = self.config.vision_config
        count = (pixels.shape[-2] // vision.patch_size) * (pixels.shape[-1] // vision.patch_size)
        if vision.model_type == "clip_vision_model":
            count += self.config.vision_feature_select_strategy == "full"  # the class token
        elif self.config.vision_feature_select_strategy == "default":
            count -= 1
        return EncodedImages([self.image_token * int(count)] * len(images), pixels, ones(len(images)))

    def unused(self, model: Any) -> Sequence[nn.Module]:
        """Return the layers after the one whose output is used, and the norm after them."""
        chosen = self.config.vision_feature_layer
        chosen = [chosen] if isinstance(chosen, int) else chosen
        tower = model.get_submodule("model.vision_tower")
        parts = [part for name, part in tower.named_modules() if name.rpartition(".")[2] in ("post_layernorm", "head")]
        layers = next(part for part in tower.modules() if isinstance(part, nn.ModuleList))
        # The first hidden state is that of the embeddings.
        last = max(each if each >= 0 else len(layers) + 1 + each for each in chosen)
        return [*parts, *layers[last:]]

    def arguments(self, batch: PixelBatch) -> Mapping[str, Any]:
        return {"pixel_values": batch.pixels}
