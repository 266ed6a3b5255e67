"""Entry points: the kind of model, the prompt sources, and the hook that keeps images of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import Component, Section

from .config import FAMILIES, TINY, DrawnDigitsConfig, ImagesConfig


def is_image_text(path: str, config: Mapping[str, Any]) -> bool:
    """Return whether a model sees: `builtin:tiny-vision`, or a folder whose `config.json` names a known family."""
    return path == TINY or (config.get("model_type") in FAMILIES and "vision_config" in config)


image_text = Component(
    "Image-text model from transformers: LLaVA, SmolVLM, Gemma 3, Qwen-VL, InternVL",
    Section,
    "rlhf_vision.kind:ImageText",
    claims=is_image_text,
)
images = Component(
    summary="Another source, whose records have images: paths, base64, bytes or Pillow images.",
    config=ImagesConfig,
    build="rlhf_vision.image_records:build",
)
drawn_digits = Component(
    summary="Generated pictures of digits to read (the task of builtin:tiny-vision).",
    config=DrawnDigitsConfig,
    build="rlhf_vision.drawn_digits:build",
)
sample_images = Component(
    summary="Keeps small copies of the images of samples in the run folder, which the report and the dashboard show.",
    config=Section,
    build="rlhf_vision.sample_images:SampleImages",
    always_on=True,
)
