"""A tokenizer for makers that work with token ids only."""

from __future__ import annotations

from collections.abc import Sequence


class IdTokenizer:
    """Tokenizer for prompts of token ids. Its texts are the ids, separated by spaces.

    Example:
        >>> IdTokenizer(eos_token_id=0).decode([5, 7, 0], skip_special_tokens=True)
        '5 7'
    """

    pad_token_id: int | None = None
    chat_template: str | None = None

    def __init__(self, eos_token_id: int | Sequence[int] | None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the ids as text, without the EOS ids if `skip_special_tokens`."""
        special = self.eos_token_id if isinstance(self.eos_token_id, Sequence) else (self.eos_token_id,)
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i in special))
