"""Create a causal LM and a tokenizer in milliseconds, without a hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import ModelConfig
from rlhf_models import load_policy, load_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

CHARACTERS = "0123456789>,"
"""Characters of `sort-digits`, with ids from 4, after pad, bos, eos and unk."""


POLICY_PATH = "builtin:tiny-digits"
"""`model.path` of a run with a model created in code."""


def tiny_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerBase:
    """Create a tokenizer with one token per character, plus pad, bos, eos and unk (ids 0 to 3).

    Args:
        characters: Characters of the vocabulary, with ids from 4.

    Returns:
        A transformers tokenizer that does not add special tokens by itself.

    Example:
        >>> tiny_tokenizer("abc").encode("cab")
        [6, 4, 5]
    """
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seed: int = 0,
    hidden_size: int = 16,
    num_layers: int = 2,
    num_heads: int = 2,
) -> PreTrainedModel:
    """Create a Llama in float32 with 512 positions, the same for the same seed.

    Args:
        tokenizer: Tokenizer whose vocabulary and special tokens to use. None is `tiny_tokenizer()`.
        seed: Seed of the weights. The global generator is left unchanged.
        hidden_size: Width of the residual stream.
        num_layers: Number of layers.
        num_heads: Number of attention heads.

    Returns:
        A `LlamaForCausalLM` on the CPU.

    Example:
        >>> tiny_model(seed=1).config.vocab_size
        16
    """
    from transformers import LlamaForCausalLM

    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    model: PreTrainedModel = _llama(
        LlamaForCausalLM,
        seed,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def _llama(kind: type[Any], seed: int, *, hidden_size: int, **options: Any) -> Any:
    import torch
    from transformers import LlamaConfig

    width = hidden_size * 8 // 3 // 32 * 32
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=width,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **options,
    )
    # Initialization draws from torch's global generator. The fork restores its state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config)


def builtin_model(path: str = POLICY_PATH, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Create the model and tokenizer of a run with `model.path: builtin:NAME`.

    Args:
        path: `builtin:NAME`.
        seed: Seed of the weights.

    Returns:
        The model in float32, and its tokenizer.
    """
    import torch

    config = ModelConfig(path=path)
    return load_policy(config, dtype=torch.float32, seed=seed), load_tokenizer(config)


def tiny_classifier() -> LlamaForSequenceClassification:
    """Create a sequence classifier of 16 token ids with one label, always the same.

    Its padding token is its EOS token, 2. transformers' own pooling is wrong in this case.

    Returns:
        A `LlamaForSequenceClassification` in evaluation mode.
    """
    from transformers import LlamaForSequenceClassification

    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {"pad_token_id": 2, "eos_token_id": 2, "num_labels": 1}
    model: LlamaForSequenceClassification = _llama(LlamaForSequenceClassification, 0, **sizes, **options).eval()
    return model


def save_tiny_model(folder: Path, *, seed: int = 0, with_tokenizer: bool = True) -> Path:
    """Write a model folder for `model.path`.

    Args:
        folder: Folder to write.
        seed: Seed of the weights.
        with_tokenizer: Also save the tokenizer.

    Returns:
        `folder`.
    """
    tiny_model(seed=seed).save_pretrained(folder)
    if with_tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder
