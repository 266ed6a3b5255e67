"""Rules that end an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.types import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopRule:
    """Ends a row at an EOS token, at a stop text, or at its limit, in this order.

    A stop text is searched in the sampled text only, never across the boundary to the prompt. Special tokens are part
    of the text, so one of them (`<|im_end|>`) can be a stop text.
    """

    def __init__(self, eos_ids: frozenset[int], stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> None:
        self.eos_ids = eos_ids
        self._stop = stop
        self._tokenizer = tokenizer
        # Every token except special ones has at least one byte, and a character at most four.
        self._tail_tokens = 4 * max((len(text) for text in stop), default=0) + 8
        self._may_end_stop: dict[int, bool] = {}

    def reason(self, token_ids: list[int], limit: int) -> FinishReason | None:
        """Reason why a row ends with its last sampled token, None if it continues."""
        if token_ids[-1] in self.eos_ids or self._at_stop_text(token_ids):
            return "stop"
        return "length" if len(token_ids) >= limit else None

    def _at_stop_text(self, token_ids: list[int]) -> bool:
        if not self._stop or not self._can_end(token_ids[-1]):
            return False
        tail = self._decode(token_ids[-self._tail_tokens :])
        return any(text in tail for text in self._stop)

    def _can_end(self, token_id: int) -> bool:
        """Whether a stop text can end inside this token, cached per token. This saves most decoding."""
        known = self._may_end_stop.get(token_id)
        if known is None:
            text = self._decode([token_id])
            # Decoded alone, a token may lose its leading space or be half a character.
            known = "�" in text or any(last.isspace() or last in text for last in (s[-1] for s in self._stop))
            self._may_end_stop[token_id] = known
        return known

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
