"""A causal LM and a tokenizer made in milliseconds, without a hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.models.builtin import build_character_tokenizer, build_llama

if TYPE_CHECKING:
    from transformers import LlamaForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

CHARACTERS = "0123456789>,"
"""Characters that `sort-digits` uses; ids 4 and up, after pad, bos, eos and unk."""


POLICY_PATH = "builtin:tiny-digits"
"""`model.path` of a run with a model made in code."""


def tiny_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerBase:
    """One token per character; pad 0, bos 1, eos 2, unk 3."""
    return build_character_tokenizer(characters)


def tiny_model(
    *, seed: int = 0, hidden_size: int = 16, num_layers: int = 2, characters: str = CHARACTERS
) -> PreTrainedModel:
    """A Llama of some thousand parameters in float32, the same for the same seed; it knows 512 positions."""
    tokenizer = tiny_tokenizer(characters)
    return build_llama(tokenizer, hidden_size=hidden_size, num_layers=num_layers, num_heads=2, seed=seed)


def tiny_classifier() -> LlamaForSequenceClassification:
    """A model that scores texts of 16 token ids, always the same; its padding token is its end token, 2.

    transformers' own pooling gets this case wrong.
    """
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config: Any = LlamaConfig(  # type: ignore[call-arg]  # its fields come from a decorator that mypy cannot read
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=2,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: LlamaForSequenceClassification = LlamaForSequenceClassification(config).eval()
    return model


def save_tiny_model(folder: Path, *, seed: int = 0, with_tokenizer: bool = True) -> Path:
    """Write a model folder for `model.path`; returns it."""
    tiny_model(seed=seed).save_pretrained(folder)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder
