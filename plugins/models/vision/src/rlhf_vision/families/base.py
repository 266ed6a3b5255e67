"""Interface of a family of image-text models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rlhf_core.errors import UserInputError

from ..image_columns import COUNT, PIXELS, SIZES

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EncodedImages:
    """Images of one prompt in order, ready for the model."""

    texts: Sequence[str]
    """For each image, the text with image tokens that takes the place of its placeholder."""
    pixels: Tensor
    """[rows, ...] uint8: a row for each image, tile or patch, image by image, before normalization."""
    sizes: Tensor
    """[images, k] int64. The first number is that of the image's rows in `pixels`, others belong to the family."""


@dataclass(frozen=True, slots=True)
class PixelBatch:
    """The images of a batch without padding, in the order of its rows."""

    is_image: Tensor
    """[B, S] bool, True = an image token, which a feature of an image replaces."""
    pixels: Tensor
    """[rows, ...] float32, normalized."""
    sizes: Tensor
    """[images, k] int64."""


class Family(ABC):
    """Writes images in prompts, and creates the arguments of a forward pass.

    An instance belongs to a model's folder: it has the config, the tokenizer and the image processor.
    """

    pixel_dims: ClassVar[int] = 4
    """Number of dimensions of `EncodedImages.pixels`."""
    size_columns: ClassVar[int] = 1
    """Number of values for each image in `EncodedImages.sizes`."""
    processor_class: ClassVar[str]
    """Name of the PIL image processor in transformers that is used if the folder does not name one."""

    def __init__(self, config: Any, tokenizer: Any, processor: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor

    @property
    @abstractmethod
    def placeholder(self) -> str:
        """Text that the chat template writes for an image part, and that stands for exactly one image."""

    @property
    def plain(self) -> str:
        """Text that stands for an image in a prompt without a chat template. It contains `placeholder`."""
        return self.placeholder

    @property
    def image_token_id(self) -> int:
        """Id of the tokens that features replace."""
        return int(self.config.image_token_id)

    @property
    def image_token(self) -> str:
        """Text of the image token."""
        return str(self.tokenizer.convert_ids_to_tokens(self.image_token_id))

    @abstractmethod
    def encode(self, images: Sequence[Image]) -> EncodedImages:
        """Encode at least one image, in RGB."""

    @abstractmethod
    def arguments(self, batch: PixelBatch) -> Mapping[str, Any]:
        """Return the forward's arguments for a batch with at least one image."""

    def size_arguments(self, sizes: Tensor) -> Mapping[str, Tensor]:
        """Return those of `arguments` that describe images, name -> [images, k]. `sizes`: as in `PixelBatch`."""
        return {}

    def text_arguments(self, input_ids: Tensor, attention_mask: Tensor) -> Mapping[str, Any]:
        """Return the forward's other arguments, which it also needs without images. [B, S] int64 and bool."""
        return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0)}

    def position_offset(self, sizes: Tensor) -> int:
        """Return the position of the token after a prompt, minus the prompt's length. `sizes`: its images."""
        return 0

    def no_images(self) -> dict[str, Tensor]:
        """Return the columns of a prompt without images."""
        pixels = torch.zeros((0,) * self.pixel_dims, dtype=torch.uint8)
        sizes = torch.zeros(0, self.size_columns, dtype=torch.int64)
        return {PIXELS: pixels, SIZES: sizes, COUNT: torch.tensor(0)}

    def unused(self, model: Any) -> Sequence[nn.Module]:
        """Return the parts of the model that do not change its output. They are not trained."""
        return ()

    def processed(self, images: Sequence[Image], **options: Any) -> Mapping[str, Any]:
        """Return the results of the image processor as tensors, with pixels in uint8, before normalization.

        Raises:
            UserInputError: The processor makes values that are not those of pixels.
        """
        result = self.processor(list(images), return_tensors="pt", do_rescale=False, do_normalize=False, **options)
        pixels = result["pixel_values"]
        values = pixels.to(torch.uint8)
        if values.dtype != pixels.dtype and not torch.equal(values.to(pixels.dtype), pixels):
            raise UserInputError(
                f"the image processor {type(self.processor).__name__} makes values other than 0 to 255",
                where="model.path",
                hint="use the preprocessor_config.json that the model was published with",
            )
        return {**result, "pixel_values": values}

    def normalized(self, pixels: Tensor) -> Tensor:
        """Rescale and normalize pixels as the image processor does. They are stored in a quarter of the memory.

        Args:
            pixels: [rows, ...] uint8. The dimension after the rows contains the channels, or starts with them.

        Returns:
            [rows, ...] float32.
        """
        processor, values = self.processor, pixels.float()
        if processor.do_rescale:
            values = values * processor.rescale_factor
        if processor.do_normalize:
            mean, std = (values.new_tensor(each)[:, None] for each in (processor.image_mean, processor.image_std))
            values = ((values.view(len(values), len(mean), -1) - mean) / std).view(pixels.shape)
        return values

    def whole(self, value: float, what: str) -> int:
        """Return a number of tokens as an int. Raises `UserInputError` if config and processor do not fit."""
        if value < 1 or value != int(value):
            raise UserInputError(
                f"{what} gives {value:g} image tokens, not a whole number",
                where="model.path",
                hint="the folder's preprocessor_config.json belongs to another model",
            )
        return int(value)


def ones(count: int) -> Tensor:
    """Return sizes of images with one row each, [count, 1]."""
    return torch.ones(count, 1, dtype=torch.int64)
