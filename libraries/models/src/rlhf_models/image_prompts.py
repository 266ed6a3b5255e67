"""Images of prompts, one by one, for engines with their own copy of the model (a vLLM process)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, processed for the model."""

    first: int
    """Position in the prompt of the first token that a feature of the image replaces."""
    is_feature: Tensor
    """[length] bool, from `first` to the last such token: True if a feature replaces the token."""
    pixels: Tensor
    """[rows, ...] float32, normalized: the `pixel_values` of transformers, a row for each image, tile or patch."""
    sizes: Mapping[str, Tensor]
    """Other arguments of transformers' forward, name -> [k] int64, such as `image_grid_thw`."""
    digest: str
    """Hex digits, equal for images with equal pixels and sizes."""


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt as the model reads it."""

    ids: tuple[int, ...]
    """Token ids. Image tokens are those of `images` only."""
    images: tuple[PromptImage, ...]


class ImagePrompts(ABC):
    """Mixin for a `ModelKind` whose prompt columns are images, so that engines can pass them to another program.

    Example:
        kind.save_processor(folder)  # alongside config and tokenizer, before the other program starts
        prompt = kind.image_prompt(request.prompt_ids, request.inputs)  # once for each prompt
    """

    @property
    @abstractmethod
    def image_token_id(self) -> int:
        """Id of the tokens that features of images replace. An answer of another program must end at one."""

    @abstractmethod
    def image_prompt(self, prompt_ids: Sequence[int], columns: Mapping[str, Tensor]) -> ImagePrompt:
        """Return a prompt's ids and images.

        Args:
            prompt_ids: Ids of the prompt, which may continue with earlier turns.
            columns: Name -> value, the prompt columns marked `model_input`.

        Raises:
            DataError: The ids lack image tokens.
        """

    @abstractmethod
    def save_processor(self, folder: Path) -> None:
        """Write the files of the image processor.

        Args:
            folder: Folder with the model's config.
        """
