"""Options of the reward `model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from rlhf_core.config import Section

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json")


class ModelRewardConfig(Section):
    """A transformers sequence-classification model and how it scores."""

    removed: ClassVar[Mapping[str, str]] = {"batch_invariant": "max_batch_tokens: 1 scores each answer alone"}
    path: str = Field(min_length=1, description="Model folder (weights as safetensors, tokenizer beside) or hub name.")
    label_index: int | None = Field(
        None, ge=0, description="The label whose logit is the score; needed where the model has more than one."
    )
    encoding: Literal["auto", "tokens", "continuation", "conversation"] = Field(
        "auto",
        description="What the model reads. tokens: the policy's own token ids. continuation: the prompt, in the reward "
        "model's chat template for a chat, then the answer, then its end-of-sequence token unless the answer was cut. "
        "conversation: the chat template over the whole conversation, as most published chat reward models are used. "
        "auto: tokens where both tokenizers are the same, else conversation for a chat and continuation for a text.",
    )
    append_eos: bool = Field(
        False,
        description="Read a cut answer at an end-of-sequence token put behind it, since that is where reward models "
        "learn to be read; what they say at another token may be anything, and a policy finds out. Not for "
        "conversation, where the template ends the answer.",
    )
    steps: Literal["min", "mean", "product", "last", "turns"] | None = Field(
        None,
        description="For a process reward model: how the chances that each step is right become one score, 0 to 1. A "
        "step is a turn of the policy, or a part of a single answer. turns: the mean, of which each turn of an episode "
        "earns its part, for algorithms that credit turns. null: one score at the end, as it is.",
    )
    step_separator: str = Field("\n", description="With steps: what ends a step of a single answer, as in training.")
    max_tokens: int | None = Field(
        None, ge=1, description="Longest prompt and answer together, in tokens; null takes the model's own limit."
    )
    too_long: Literal["error", "cut"] = Field(
        "error", description="A longer one is an error, or loses its beginning (its end, for models that read [CLS])."
    )
    max_batch_tokens: int = Field(
        16384,
        ge=1,
        description="Most tokens, padding included, in one forward pass; one answer always goes through. "
        "1: each goes alone, so that not a bit of its score depends on what else is scored. Slower.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto (the policy's), cpu, cuda or cuda:N."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights; auto is float32 on a CPU, bfloat16 on a GPU."
    )
    offload: bool = Field(False, description="Keep the weights in host memory while nothing is scored.")

    @field_validator("path")
    @classmethod
    def _is_model_folder(cls, path: str) -> str:
        folder = Path(path).expanduser()
        if not folder.exists():
            if path.startswith((".", "/", "~")) or path.count("/") != 1:
                raise ValueError("there is no such folder; paths start at the current folder")
            return path  # a hub name
        if not (folder / "config.json").is_file():
            raise ValueError("holds no config.json, so it is no transformers model folder")
        if not any(folder.glob("*.safetensors")):
            raise ValueError("holds no *.safetensors weights: save the model with save_pretrained(...)")
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            raise ValueError("has no tokenizer: tokenizer.save_pretrained(folder) beside the model")
        return path
