"""Prompts with images in the form that vLLM's engine takes from its own renderer (`MultiModalInput`).

The ids, the pixels and the positions of the images are those of the trainer, so vLLM neither processes an image nor
expands a token. Names of vLLM's arguments are those of its models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import PluginError
from rlhf_models import PromptImage

from .start import WHERE

TYPES = ("llava", "idefics3", "smolvlm", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Types of models (`model_type`) whose log-probs `test_real_vllm_images` compares with those of the trainer."""
_KIND = "image"
_COUNTS: Mapping[str, str] = {
    "idefics3": "num_patches",
    "smolvlm": "num_patches",
    "internvl": "image_num_patches",
}
"""`model_type` -> argument with the number of each image's rows of pixels."""
_MASKED = frozenset({"idefics3", "smolvlm"})
"""Types whose tiles may be padded, so that vLLM's model needs a mask."""


def check_version() -> None:
    """Raise `PluginError` if vLLM does not take processed images."""
    try:
        from vllm.inputs import mm_input  # noqa: F401
    except ImportError as error:
        raise PluginError(
            "this version of vLLM does not take processed images", where=WHERE, hint="install vLLM 0.32 or newer"
        ) from error


def image_input(
    ids: Sequence[int],
    images: Sequence[PromptImage],
    *,
    model_type: str,
    image_token_id: int,
    version: str,
) -> Any:
    """Return vLLM's `MultiModalInput` of a prompt.

    Args:
        ids: Ids of the prompt, image tokens included.
        images: At least one image of the prompt.
        model_type: Type of the model's config.
        image_token_id: Id of the image token.
        version: Version of the weights. Features of images and prefixes of another version are not reused.
    """
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig as Fields
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    rows = torch.tensor([len(each.pixels) for each in images])
    pixels = torch.cat([each.pixels for each in images])
    by_row: dict[str, Tensor] = {"pixel_values": pixels}
    by_image = {name: torch.stack([each.sizes[name] for each in images]) for name in images[0].sizes}
    if model_type in _MASKED:
        by_row["pixel_attention_mask"] = torch.ones(len(pixels), *pixels.shape[-2:], dtype=torch.bool)
    if name := _COUNTS.get(model_type):
        by_image[name] = rows
    if model_type == "internvl":
        by_image["image_token_id"] = torch.full((len(images),), image_token_id)
    flat, single = Fields.flat_from_sizes(_KIND, rows), Fields.batched(_KIND, keep_on_cpu=True)
    fields = {**dict.fromkeys(by_row, flat), **dict.fromkeys(by_image, single)}
    ranges = [
        PlaceholderRange(each.first, len(each.is_feature), None if bool(each.is_feature.all()) else each.is_feature)
        for each in images
    ]
    return mm_input(
        list(ids),
        MultiModalKwargsItems.from_hf_inputs({**by_row, **by_image}, fields),
        {_KIND: [f"{each.digest}-{version}" for each in images]},
        {_KIND: ranges},
        cache_salt=version,
    )
