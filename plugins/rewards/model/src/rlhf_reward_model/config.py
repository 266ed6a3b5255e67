"""Options of the reward `model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from rlhf_core.config import Section

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json")


class ModelRewardConfig(Section):
    """Options of `model`: a transformers sequence-classification model and the way it scores."""

    removed: ClassVar[Mapping[str, str]] = {"batch_invariant": "max_batch_tokens: 1 scores each answer alone"}
    path: str = Field(min_length=1, description="Model folder (safetensors weights and tokenizer) or hub name.")
    label_index: int | None = Field(
        None, ge=0, description="Label whose logit is the score. Required if the model has more than one label."
    )
    encoding: Literal["auto", "tokens", "continuation", "conversation"] = Field(
        "auto",
        description="Input of the model. tokens: the policy's own token ids. continuation: the prompt, in the reward "
        "model's chat template for a chat, then the answer, then its end-of-sequence token unless the answer was cut. "
        "conversation: the chat template over the whole conversation, as most published chat reward models are used. "
        "auto: tokens if both tokenizers are the same, else conversation for a chat and continuation for a text.",
    )
    append_eos: bool = Field(
        False,
        description="Append an end-of-sequence token to a cut answer and read the score there. Reward models are "
        "trained at this token. Their scores at other tokens are unreliable, and a policy can exploit this. No effect "
        "with conversation, in which the template ends the answer.",
    )
    steps: Literal["min", "mean", "product", "last", "turns"] | None = Field(
        None,
        description="For a process reward model: how the probabilities that each step is right become one score in "
        "[0, 1]. A step is a turn of the policy, or a part of a single answer. turns: the mean, with each turn's share "
        "assigned to that turn, for algorithms that credit turns. null: one score, the logit at the end.",
    )
    step_separator: str = Field("\n", description="With steps: text that ends a step of an answer, as in training.")
    max_tokens: int | None = Field(
        None, ge=1, description="Maximum length of prompt and answer in tokens. null uses the model's own limit."
    )
    too_long: Literal["error", "cut"] = Field(
        "error", description="error: a longer one fails. cut: drop its beginning (its end for models that read [CLS])."
    )
    max_batch_tokens: int = Field(
        16384,
        ge=1,
        description="Maximum number of tokens in one forward pass, padding included. A longer answer is scored alone. "
        "1: score each answer alone, so that its score does not depend on the others at all. Slower.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto (the policy's), cpu, cuda or cuda:N."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights. auto is float32 on a CPU, bfloat16 on a GPU."
    )
    offload: bool = Field(False, description="Keep the weights in host memory while nothing is scored.")

    @field_validator("path")
    @classmethod
    def _is_model_folder(cls, path: str) -> str:
        folder = Path(path).expanduser()
        if not folder.exists():
            if path.startswith((".", "/", "~")) or path.count("/") != 1:
                raise ValueError("no such folder (relative paths start at the current folder)")
            return path  # a hub name
        if not (folder / "config.json").is_file():
            raise ValueError("contains no config.json, so it is not a transformers model folder")
        if not any(folder.glob("*.safetensors")):
            raise ValueError("contains no *.safetensors weights: save the model with save_pretrained(...)")
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            raise ValueError("contains no tokenizer: save it with tokenizer.save_pretrained(folder)")
        return path
