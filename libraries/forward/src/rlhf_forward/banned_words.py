"""Words that are never sampled, as sequences of token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BannedWords:
    """Token sequences of words that may not be sampled, with and without a space before them, as in vLLM."""

    def __init__(
        self, words: Sequence[str], tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int] = ()
    ) -> None:
        """Encode the words.

        Args:
            words: The words.
            tokenizer: The policy's tokenizer.
            eos_token_ids: Ids that end an answer.

        Raises:
            ConfigError: A word cannot be encoded, or is the end of an answer.
        """
        self.sequences: list[tuple[int, ...]] = []
        """Each banned sequence of ids."""
        for word in words:
            plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
            is_end = len(plain) == 1 and plain[0] in {tokenizer.eos_token_id, *eos_token_ids}
            if not plain or tokenizer.unk_token_id in plain or is_end:
                problem = "is the end of an answer" if is_end else "cannot be encoded"
                raise ConfigError(f"{word!r} {problem}", where="engine.banned_words", hint="remove it")
            self.sequences.append(plain)
            spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
            if len(spaced) == len(plain) and spaced[0] != plain[0] and tokenizer.unk_token_id not in spaced:
                self.sequences.append(spaced)

    def after(self, token_ids: Sequence[int], place: int) -> list[int]:
        """Return the ids that may not follow an answer's tokens: one for each sequence, or -1 if it may continue.

        Args:
            token_ids: Tokens of the answer.
            place: Number of them that precede the next token.
        """
        banned = []
        for sequence in self.sequences:
            prefix = sequence[:-1]
            is_at_end = len(prefix) <= place and tuple(token_ids[place - len(prefix) : place]) == prefix
            banned.append(sequence[-1] if is_at_end else -1)
        return banned
