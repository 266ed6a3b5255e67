"""Options of the engine `hf`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.config import EngineConfig


class HfEngineConfig(EngineConfig):
    """Rollouts by transformers."""

    request_options: ClassVar[Mapping[str, str]] = {
        "temperature": "softmax temperature of this request's tokens, above 0, in place of engine.temperature"
    }
    removed: ClassVar[Mapping[str, str]] = {
        "compile": "decoding steps run as they are; remove it",
        "prepack": "linear weights are packed where that is faster; remove it",
        "cuda_graphs": "decoding steps run as they are; remove it, and use the engine vllm for CUDA graphs",
    }

    max_batch_size: int = Field(64, ge=1, le=4096, description="Rows decoded at once (slots of the key-value cache).")
    max_cache_tokens: int = Field(
        131_072,
        ge=64,
        description="Bound on the key-value cache, in tokens over all slots; fewer slots are used when the longest "
        "possible sequences would not fit.",
    )
    prefill_batch_tokens: int = Field(
        4096, ge=1, description="Prompt tokens in one forward pass, padding included; bounds its memory."
    )
    prefix_cache_tokens: int = Field(
        32_768,
        ge=0,
        description="Tokens of earlier turns whose keys and values are kept until an episode's next turn, beside those "
        "of max_cache_tokens; 0 computes them again.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Arithmetic over float32 weights: auto is that of the trainer's forward; fp32 leaves the weights "
        "as they are. Mixed precision keeps a copy of the linear weights while generating.",
    )
