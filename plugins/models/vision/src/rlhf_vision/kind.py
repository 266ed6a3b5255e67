"""The kind of model `image-text`: transformers' `AutoModelForImageTextToText`, fed with images of conversations."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core import Column
from rlhf_core.errors import DataError, RlhfError, UserInputError, first_line
from rlhf_images import ImageError, ImageReference, accept_text_messages, render_prompt
from rlhf_models import CausalLM, ImagePrompt, ImagePrompts, PromptInputs

from .config import FAMILIES, TINY
from .families.base import EncodedImages, Family, PixelBatch
from .image_columns import (
    COLUMNS,
    COUNT,
    PIXELS,
    SIZES,
    find_image_tokens,
    images_of_rows,
    joined_rows,
    observed_columns,
)
from .prompt_images import prompt_images
from .tiny import tiny_config, tiny_model, tiny_processor, tiny_tokenizer

logger = logging.getLogger(__name__)
_WHERE = "model.path"
_LANGUAGE = frozenset({"language_model", "text_model"})
"""Names of the language model in the families. Vision towers of some have a part `vision_model`."""


class ImageText(PromptInputs, ImagePrompts, CausalLM):
    """Encodes images in prompts, and feeds them to the model in every forward pass."""

    auto_class = "AutoModelForImageTextToText"
    columns: Mapping[str, Column] = COLUMNS

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the family, which belongs to the process."""
        return {name: value for name, value in vars(self).items() if name != "family"}

    @property
    def is_tiny(self) -> bool:
        """Whether this is the model that is made in code."""
        return self.model.path == TINY

    @cached_property
    def family(self) -> Family:
        """The family of the model, with its config, tokenizer and image processor."""
        return self._family(self.load_tokenizer())

    def _family(self, tokenizer: Any) -> Family:
        if self.is_tiny:
            config: Any = tiny_config()
        else:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(self.model.path, trust_remote_code=self.model.trust_remote_code)
        if config.model_type not in FAMILIES:
            raise UserInputError(
                f"image-text models of the type {config.model_type} are not supported",
                where=_WHERE,
                hint=f"use one of {', '.join(FAMILIES)}",
            )
        module, _, name = FAMILIES[config.model_type].partition(":")
        family: type[Family] = getattr(import_module(f".{module}", __package__), name)
        return family(config, tokenizer, tiny_processor() if self.is_tiny else self._processor(family))

    def _processor(self, family: type[Family]) -> Any:
        """Load the image processor in its PIL form, which does not need torchvision."""
        import transformers

        path = self.model.path
        if not Path(path).is_dir():
            raise UserInputError(f"there is no folder {path!r}", where=_WHERE, hint="download the model first")
        try:
            names = ("preprocessor_config.json", "processor_config.json")
            if not any((Path(path) / name).is_file() for name in names):
                return getattr(transformers, family.processor_class)()
            return transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
        except Exception as error:  # the class depends on the library that is missing or the file that is broken
            problem = f"cannot load the image processor of {path!r}: {first_line(error)}"
            hint = "use the preprocessor_config.json that the model was published with"
            if "torchvision" in str(error) and find_spec("torchvision") is None:
                problem = f"the image processor of {path!r} has no PIL form, and torchvision is not installed"
                hint = "pip install torchvision, built for your version of torch"
            raise UserInputError(problem, where=_WHERE, hint=hint) from error

    def check(self) -> None:
        if not self.is_tiny:
            super().check()

    def read_tokenizer(self) -> Any:
        return tiny_tokenizer() if self.is_tiny else super().read_tokenizer()

    def load_tokenizer(self) -> Any:
        tokenizer = super().load_tokenizer()
        accept_text_messages(tokenizer)
        return tokenizer

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: Any) -> Any:
        if self.is_tiny:
            model = tiny_model(seed).to(dtype)
        else:
            model = super().load(dtype=dtype, seed=seed, tokenizer=tokenizer)
        self._freeze_unused(model)
        return model

    def _freeze_unused(self, model: Any) -> None:
        """Freeze parts without an effect. DDP would wait for their gradients."""
        for part in self.family.unused(model):
            part.requires_grad_(False)

    def add_adapter(self, model: Any, options: Any, seed: int) -> Any:
        """Add a LoRA adapter to all linear layers, to those named, or with `[language]` to those of the language model.

        Args:
            model: The loaded model.
            options: The section `model.lora`.
            seed: Seed of the adapter's weights.
        """
        if options.target_modules and list(options.target_modules) == ["language"]:
            names = [
                name
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and any(part in _LANGUAGE for part in name.split("."))
            ]
            options = options.model_copy(update={"target_modules": names})
        adapted = super().add_adapter(model, options, seed)
        self._freeze_unused(model)
        return adapted

    def save(self, model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
        super().save(model, weights, tokenizer, folder)
        self.save_processor(folder)

    def save_processor(self, folder: Path) -> None:
        """Write the files of the image processor (see `ImagePrompts`)."""
        self.family.processor.save_pretrained(folder)

    def encode(self, record: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[Sequence[int], Mapping[str, Any]]:
        """Return the prompt's ids with image tokens, and the pixels of its images."""
        references = record.get("images") or []
        family = self.family
        observed = observed_columns((), family.no_images())
        if not references:
            return prompt_ids, {**family.no_images(), **observed}
        if not all(isinstance(each, ImageReference) for each in references):
            raise DataError("its images are not read", hint="read the prompts with the source images")
        text, is_chat = render_prompt(record, family.tokenizer, family.plain)
        text, columns = self.place_images(text, [self.encode_image(each) for each in references])
        ids = family.tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"]
        if ids.count(family.image_token_id) != columns[COUNT]:
            raise DataError(
                f"its prompt has {ids.count(family.image_token_id)} image tokens, not those of its images",
                hint=f"remove {family.image_token} from the text of the prompt",
            )
        return ids, {**columns, **observed}

    def encode_image(self, image: ImageReference) -> EncodedImages:
        """Decode an image and process it for the model. May be called in any thread, in one at a time.

        Args:
            image: The image, in the process that read it.

        Returns:
            The image for `place_images`, which does not change it.

        Raises:
            DataError: The image cannot be used.
        """
        try:
            return self.family.encode([image.open()])
        except RlhfError:
            raise
        except Exception as error:  # image processors refuse sizes with many classes
            problem = f"the model cannot use an image of {image['width']} x {image['height']} pixels"
            raise ImageError(f"{problem}: {first_line(error)}", hint="crop or resize it") from error

    def place_images(self, text: str, images: Sequence[EncodedImages]) -> tuple[str, Mapping[str, Tensor]]:
        """Return a rendered text with the tokens of its images, and the columns of these images.

        Args:
            text: Text of the chat template, with a placeholder for each image.
            images: The images in order, as `encode_image` returns them.

        Returns:
            The text, and the columns of a prompt that consists of it.

        Raises:
            DataError: The text has more or fewer placeholders.
        """
        family, pieces = self.family, text.split(self.family.placeholder)
        if len(pieces) != len(images) + 1:
            raise DataError(
                f"it has {len(images)} images, but its text contains {family.placeholder} {len(pieces) - 1} times",
                hint="remove this text, or check the model's chat template: it may ignore images in this message",
            )
        if not images:
            return text, family.no_images()
        texts = [each for image in images for each in image.texts]
        joined = pieces[0] + "".join(a + b for a, b in zip(texts, pieces[1:], strict=True))
        return joined, {
            PIXELS: joined_rows([each.pixels for each in images]),
            SIZES: joined_rows([each.sizes for each in images]),
            COUNT: torch.tensor(sum(each.count(family.image_token) for each in texts)),
        }

    def observed_images(self, parts: Sequence[tuple[int, Mapping[str, Tensor]]]) -> Mapping[str, Tensor]:
        """Return the columns of images that observations have added to a row.

        Args:
            parts: For each observation with images, the number of tokens of the row before it, and the columns of
                `place_images`.
        """
        return observed_columns(parts, self.family.no_images())

    def without_placeholders(self, text: str) -> str:
        """Return a text without the tokens that stand for images, which the policy might have written.

        Args:
            text: Text of a message.
        """
        for token in {self.family.placeholder, self.family.image_token}:
            while token in text:
                text = text.replace(token, "")
        return text

    def inputs(self, input_ids: Tensor, attention_mask: Tensor, columns: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Return the forward's arguments. An image token that the policy sampled is read as the pad token."""
        family = self.family
        arguments = dict(family.text_arguments(input_ids, attention_mask))
        if COUNT not in columns:
            return arguments
        is_token = (input_ids == family.image_token_id) & attention_mask
        is_image = find_image_tokens(is_token, attention_mask, columns)
        if bool((is_token & ~is_image).any()):
            arguments["input_ids"] = input_ids.masked_fill(is_token & ~is_image, self._unread_id)
        pixels, sizes = images_of_rows(columns)
        if sum(map(len, pixels)):
            normalized = family.normalized(torch.cat([each for each in pixels if len(each)]))
            arguments |= family.arguments(PixelBatch(is_image, normalized, torch.cat(sizes)))
        elif torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            # The other processes would wait for this one in the part that sees.
            raise DataError(
                "a batch without images, in a run with several processes",
                where="prompts",
                hint="use one process, or prompts that all have an image",
            )
        return arguments

    @property
    def image_token_id(self) -> int:
        """Id of the image token (see `ImagePrompts`)."""
        return self.family.image_token_id

    def image_prompt(self, prompt_ids: Sequence[int], columns: Mapping[str, Tensor]) -> ImagePrompt:
        """Return a prompt's ids, with the pad token for image tokens that the policy sampled, and its images.

        See `ImagePrompts`.
        """
        ids, batch = torch.tensor([prompt_ids]), {name: value[None] for name, value in columns.items()}
        is_token = ids == self.image_token_id
        is_image = torch.zeros_like(is_token)
        if batch:
            is_image = find_image_tokens(is_token, torch.ones_like(is_token), batch)
        read = tuple(ids.masked_fill(is_token & ~is_image, self._unread_id)[0].tolist())
        return ImagePrompt(read, prompt_images(self.family, is_image, batch) if bool(is_image.any()) else ())

    def kept(self, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the offset of positions after each prompt (see `PromptInputs`)."""
        offsets = [self.family.position_offset(sizes) for sizes in images_of_rows(columns)[1]]
        return {"offsets": torch.tensor(offsets, device=columns[SIZES].device)}

    def continued(self, input_ids: Tensor, lengths: Tensor, kept: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Return the forward's arguments for tokens that continue a cache (see `PromptInputs`)."""
        is_token = input_ids == self.family.image_token_id
        positions = (lengths + kept["offsets"])[:, None]
        return {"input_ids": input_ids.masked_fill(is_token, self._unread_id), "position_ids": positions}

    @property
    def _unread_id(self) -> int:
        tokenizer = self.family.tokenizer
        return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
