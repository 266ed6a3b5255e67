"""Tokenizers in the form that llguidance reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rlhf_core.errors import ConfigError

from .grammar_compiler import load_llguidance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_PROBED = 512


def read_tokens(tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int]) -> Any:
    """Return the tokens of a tokenizer. Raises `ConfigError` if their bytes are unknown or no token ends an answer."""
    where = "the policy's tokenizer"
    llguidance = load_llguidance(where)
    if not eos_token_ids:
        problem = "it has no token that ends an answer, which structured answers need"
        raise ConfigError(problem, where=where, hint="set eos_token in the tokenizer's files")
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(cast("Any", tokenizer), eos_token=eos_token_ids)
    except ValueError as error:
        if not _is_plain(tokenizer):
            problem = f"its tokens are not the bytes of their text, so structured answers do not work with it ({error})"
            raise ConfigError(problem, where=where, hint="use a byte-level tokenizer, as most models have") from error
    wrapper = llguidance.TokenizerWrapper(_PlainTokens(tokenizer, eos_token_ids[0]))
    return llguidance.LLTokenizer(wrapper, n_vocab=len(tokenizer), eos_token=eos_token_ids)


def byte_tokens(size: int) -> Any:
    """Return a tokenizer of llguidance whose tokens are bytes, to check grammars without the policy's tokenizer.

    Args:
        size: Number of ids. Those from 256 on are special tokens, so that grammars may name them.

    Raises:
        ConfigError: llguidance is not installed.
    """
    llguidance = load_llguidance("structured answers")
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokens(size)), eos_token=[0])


class _ByteTokens:
    """Bytes and special tokens, in the form of a tokenizer for llguidance."""

    def __init__(self, size: int) -> None:
        self.eos_token_id = 0
        self.bos_token_id: int | None = None
        self.tokens = [bytes([each]) for each in range(256)] + [f"<{each}>".encode() for each in range(256, size)]
        self.special_token_ids = [0, *range(256, size)]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text is the concatenation of its tokens' texts, tried with some pairs of tokens."""
    texts = [str(tokenizer.decode([each])) for each in range(min(len(tokenizer), _NUM_PROBED))]
    ids = range(len(texts))
    return all(
        str(tokenizer.decode([one, two])) == texts[one] + texts[two]
        for one, two in zip(ids, reversed(ids), strict=True)
    )


class _PlainTokens:
    """Tokens whose texts are concatenated, in the form of a tokenizer for llguidance."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        self.special_token_ids = list(tokenizer.all_special_ids)
        self.tokens = [str(tokenizer.decode([each])).encode() for each in range(len(tokenizer))]
        self._unknown = tokenizer.unk_token_id
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        """Encode a text that a grammar allows as the only one. Characters without a token are left out."""
        return [each for each in self._encode(text, add_special_tokens=False) if each != self._unknown]
