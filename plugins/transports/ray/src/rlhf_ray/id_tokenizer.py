"""A tokenizer for makers that work with token ids only."""

from __future__ import annotations

from collections.abc import Sequence


class IdTokenizer:
    """Stands in where a maker is given token ids only: texts are the ids, with spaces between."""

    pad_token_id: int | None = None
    chat_template: str | None = None

    def __init__(self, eos_token_id: int | Sequence[int] | None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The ids; the EOS is left out where special tokens are not wanted."""
        special = self.eos_token_id if isinstance(self.eos_token_id, Sequence) else (self.eos_token_id,)
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i in special))
