"""Options of the engine `hf`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_forward import ShapedEngineConfig


class HfEngineConfig(ShapedEngineConfig):
    """Rollouts with transformers."""

    removed: ClassVar[Mapping[str, str]] = {
        "compile": "decoding steps are never compiled: remove it",
        "prepack": "linear weights are always packed if that is faster: remove it",
        "cuda_graphs": "this engine does not capture CUDA graphs: remove it, or use the engine vllm",
    }

    max_batch_size: int = Field(64, ge=1, le=4096, description="Rows decoded at once (slots of the key-value cache).")
    max_cache_tokens: int = Field(
        131_072,
        ge=64,
        description="Maximum size of the key-value cache, in tokens over all slots. Fewer slots are used if the "
        "longest possible sequences would not fit.",
    )
    prefill_batch_tokens: int = Field(
        4096, ge=1, description="Maximum prompt tokens per forward pass, padding included. Bounds its memory."
    )
    prefix_cache_tokens: int = Field(
        32_768,
        ge=0,
        description="Maximum tokens of earlier turns whose keys and values are kept until an episode's next turn, in "
        "addition to max_cache_tokens. 0 recomputes them.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Arithmetic over float32 weights. auto: the same as the trainer's forward pass. fp32: full "
        "precision. bf16 and fp16 keep a copy of the linear weights while generating.",
    )
