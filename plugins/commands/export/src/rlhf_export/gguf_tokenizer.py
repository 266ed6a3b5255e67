"""Describes a tokenizer in a GGUF file: tokens, merges, their type of pre-tokenizer, and special tokens.

GGUF does not store a pre-tokenizer, but the name of one that llama.cpp implements. A tokenizer that splits text in
another way is therefore refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import UserInputError

if TYPE_CHECKING:
    from gguf import GGUFWriter

WHERE = "--gguf"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST: "qwen2",
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST: "llama-bpe",
}
"""Regular expression of a pre-tokenizer -> llama.cpp's name for it."""
_SINGLE_CHARACTERS = (r"[\s\S]", r"(?s:.)", "")
_BYTES_AS_THEMSELVES = frozenset(map(chr, range(ord("!"), ord("~") + 1)))
"""Characters that the byte-level alphabet of GPT-2 maps to themselves."""


def add_tokenizer(writer: GGUFWriter, tokenizer: Any, vocab_size: int) -> None:
    """Write a tokenizer's description.

    Args:
        writer: GGUF file before its header is written.
        tokenizer: fast tokenizer of transformers.
        vocab_size: number of rows of the embeddings. Rows without a token get an unused one.

    Raises:
        UserInputError: llama.cpp cannot split text like this tokenizer.
    """
    from gguf import GGUFValueType, TokenType

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = pre_tokenizer_name(spec)
    added = {entry["id"]: entry for entry in spec["added_tokens"]}
    names = {index: token for token, index in spec["model"]["vocab"].items()}
    names |= {index: entry["content"] for index, entry in added.items()}
    if names and max(names) >= vocab_size:
        raise _refusal(f"it has {max(names) + 1} tokens, and the model {vocab_size}")
    tokens = [names.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    kinds = {index: TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED for index, each in added.items()}
    kinds |= {index: TokenType.UNUSED for index in range(vocab_size) if index not in names}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(index, TokenType.NORMAL) for index in range(vocab_size)])
    merges = [each if isinstance(each, str) else " ".join(each) for each in spec["model"].get("merges", ())]
    writer.add_key_value("tokenizer.ggml.merges", merges, GGUFValueType.ARRAY, GGUFValueType.STRING)
    _add_special_tokens(writer, tokenizer)


def _add_special_tokens(writer: GGUFWriter, tokenizer: Any) -> None:
    adders = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id}
    adders |= {"pad": writer.add_pad_token_id, "unk": writer.add_unk_token_id}
    for name, add in adders.items():
        if (index := getattr(tokenizer, f"{name}_token_id")) is not None:
            add(index)
    plain, whole = (tokenizer("0", add_special_tokens=special)["input_ids"] for special in (False, True))
    writer.add_add_bos_token(whole[:1] == [tokenizer.bos_token_id] != plain[:1])
    writer.add_add_eos_token(whole[-1:] == [tokenizer.eos_token_id] != plain[-1:])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer_name(spec: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way a tokenizer splits text.

    Args:
        spec: content of a `tokenizer.json`.

    Raises:
        UserInputError: the way is unknown to llama.cpp.
    """
    model, steps = spec["model"], list(_steps(spec["pre_tokenizer"]))
    if (normalizer := spec.get("normalizer")) is not None and normalizer["type"] != "NFC":
        raise _refusal(f"its normalizer {normalizer['type']} is not supported")
    if _splits_characters(steps) and not model.get("merges"):
        return _name_of_characters(model, {entry["content"] for entry in spec["added_tokens"]})
    if model["type"] != "BPE" or not steps or steps[-1]["type"] != "ByteLevel" or model.get("byte_fallback"):
        raise _refusal(f"only byte-level BPE is supported, and it is {model['type']} without the byte-level alphabet")
    kinds = [step["type"] for step in steps]
    if steps[-1].get("add_prefix_space"):
        raise _refusal("it adds a space before the text (add_prefix_space)")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = str(steps[0]["pattern"].get("Regex"))
        if (name := _SPLITS.get(pattern)) is not None:
            return name
    raise _refusal(
        f"its pre-tokenizer ({', '.join(kinds)}) is none of {', '.join(sorted({*_SPLITS.values()}))}, gpt-2, smollm"
    )


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] == "Sequence":
        for step in pre_tokenizer["pretokenizers"]:
            yield from _steps(step)
    else:
        yield pre_tokenizer


def _splits_characters(steps: Sequence[Mapping[str, Any]]) -> bool:
    return (
        len(steps) == 1
        and steps[0]["type"] == "Split"
        and next(iter(steps[0]["pattern"].values())) in _SINGLE_CHARACTERS
        and steps[0]["behavior"] == "Isolated"
    )


def _name_of_characters(model: Mapping[str, Any], special: set[str]) -> str:
    """A vocabulary of characters is byte-level BPE without merges, if each character is one byte."""
    others = sorted(token for token in model["vocab"] if token not in special and token not in _BYTES_AS_THEMSELVES)
    if others:
        raise _refusal(f"its tokens are single characters, of which {others[0]!r} is not a visible ASCII character")
    return "gpt-2"


def _refusal(problem: str) -> UserInputError:
    return UserInputError(
        f"the tokenizer cannot be described in a GGUF file: {problem}",
        where=WHERE,
        hint="export a model folder with --to DIR, and convert it with llama.cpp's convert_hf_to_gguf.py",
    )
