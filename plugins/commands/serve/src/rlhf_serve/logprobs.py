"""Tokens of prompts and answers as text, with their log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_episodes import TokenLogprob
from rlhf_forward import TokenScore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
"""Decoded in place of an incomplete character."""
_MAX_PARTS = 4
"""Maximum number of tokens of a character, which has at most four bytes."""


def describe(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], scores: Sequence[TokenScore]
) -> list[TokenLogprob]:
    """Return the tokens as text with their log-probs.

    Args:
        tokenizer: the model's tokenizer.
        token_ids: tokens of a prompt or an answer.
        scores: scores of its last tokens. The tokens before them are without a log-prob.
    """

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    num_unknown = len(token_ids) - len(scores)
    described: list[TokenLogprob] = []
    # A token's text depends on its neighbors: it may be a part of a character, or lose a space if decoded alone. Each
    # is decoded together with the token before it (`start` to `end`), whose text is then removed.
    start = end = 0
    for index, token in enumerate(token_ids):
        known, before = decode(token_ids[start:end]), [*token_ids[start:index]]
        text = decode([*before, token])[len(known) :]
        top: tuple[tuple[str, float], ...] = ()
        score = scores[index - num_unknown] if index >= num_unknown else None
        if score is not None:
            texts = [decode([*before, each])[len(known) :] for each in score.top_ids]
            top = tuple(zip(texts, score.top_logprobs, strict=True))
        if text.endswith(_UNFINISHED) and index + 1 - end < _MAX_PARTS:
            text = ""
        else:
            start, end = end, index + 1
        described.append(TokenLogprob(text, None if score is None else score.logprob, top))
    return described
