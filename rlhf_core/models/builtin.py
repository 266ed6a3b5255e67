"""Tiny models and tokenizers built in code, for the quickstart and for tests: `builtin:<name>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "builtin:"
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"


def build_character_tokenizer(characters: str) -> PreTrainedTokenizerBase:
    """One token per character, plus pad, bos, eos and unk (ids 0 to 3); adds no special tokens by itself."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def build_llama(
    tokenizer: PreTrainedTokenizerBase, *, hidden_size: int, num_layers: int, num_heads: int, seed: int
) -> PreTrainedModel:
    """A randomly initialised Llama in float32, the same for the same seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    # Initialisation draws from torch's global generator; the fork keeps it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _tiny_digits(seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = build_character_tokenizer("0123456789>,")
    return build_llama(tokenizer, hidden_size=96, num_layers=3, num_heads=4, seed=seed), tokenizer


BUILTIN_MODELS: dict[str, Callable[[int], tuple[PreTrainedModel, PreTrainedTokenizerBase]]] = {
    "tiny-digits": _tiny_digits,
}


def build_builtin(path: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of `builtin:<name>`."""
    check_builtin(path)
    return BUILTIN_MODELS[path.removeprefix(PREFIX)](seed)


def check_builtin(path: str) -> None:
    """Raise `UserInputError` where there is no such built-in model."""
    name = path.removeprefix(PREFIX)
    if name not in BUILTIN_MODELS:
        raise UserInputError(
            f"there is no built-in model {name!r}",
            where="model.path",
            hint=f"one of {', '.join(PREFIX + n for n in BUILTIN_MODELS)}, a model folder, or a hub name",
        )
