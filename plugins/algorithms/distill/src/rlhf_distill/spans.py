"""Aligns the tokens of two tokenizers over one text.

A span is a shortest text that both tokenizers delimit, as one or several tokens each. Log-probs of spans can be
compared although those of tokens cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

UNALIGNED = -1
"""Span of a token that no text of the teacher corresponds to."""
PARTIAL = "\ufffd"
"""Text of bytes that are not a whole character."""
_MAX_PENDING = 16
"""Maximum number of tokens that may form one character."""

Ends = Sequence[int | None]


def text_of_tokens(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> tuple[str, list[int | None]]:
    """Decode tokens, and find the position in the text at which each ends.

    Args:
        decode: Token ids -> text.
        ids: Token ids, without special tokens.

    Returns:
        The text, and for each token its end in characters. None if the token ends inside a character.

    Example:
        >>> text_of_tokens(lambda ids: bytes(ids).decode(errors="replace"), [97, 195, 169, 98])
        ('aéb', [1, None, 2, 3])
    """
    text = ""
    ends: list[int | None] = []
    first = known = 0  # tokens before `known` are in the text. Decoding starts at `first`, since blanks need context
    for index in range(len(ids)):
        before, whole = decode(ids[first:known]), decode(ids[first : index + 1])
        is_partial = whole.endswith(PARTIAL) or not whole.startswith(before)
        if is_partial and index + 1 < len(ids) and index - known < _MAX_PENDING:
            ends.append(None)
            continue
        text += whole[len(before) :]
        ends.append(len(text))
        first, known = known, index + 1
    return text, ends


def ends_of_offsets(offsets: Sequence[tuple[int, int]], length: int) -> list[int | None]:
    """Convert offsets of a fast tokenizer to ends.

    Args:
        offsets: Start and end of each token, in characters.
        length: Length of the text.

    Returns:
        End of each token. None if the next token starts before it, inside the same character.

    Example:
        >>> ends_of_offsets([(0, 1), (1, 2), (1, 2), (2, 3)], 3)
        [1, None, 2, 3]
    """
    ends: list[int | None] = [end if later >= end else None for (_, end), (later, _) in pairwise(offsets)]
    return [*ends, length] if offsets else []


def align(ours: Ends, theirs: Ends) -> tuple[list[int], list[tuple[int, int]]]:
    """Divide tokens of the same text into spans.

    Args:
        ours: End of each of our tokens. The last is the length of the text.
        theirs: The same for the other tokenizer.

    Returns:
        The span of each of our tokens, and for each span the range of its tokens in `theirs`.

    Example:
        >>> align([1, 2, 4], [2, 3, 4])  # a|b|cd and ab|c|d
        ([0, 0, 1], [(0, 1), (1, 3)])
    """
    last_of = {end: index for index, end in enumerate(theirs) if end is not None}
    last_of_ours = {end: index for index, end in enumerate(ours) if end is not None}
    spans: list[int] = []
    ranges: list[tuple[int, int]] = []
    start = 0
    for index, end in enumerate(ours):
        spans.append(len(ranges))
        if end is not None and end in last_of and last_of_ours[end] == index:
            ranges.append((start, last_of[end] + 1))
            start = last_of[end] + 1
    return spans, ranges


def align_answer(policy: Any, teacher: Any, ids: Sequence[int]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Encode an answer with the teacher's tokenizer, and align both.

    A special token at the end corresponds to the teacher's EOS. Other special tokens are `UNALIGNED`, as are texts with
    bytes that are not a whole character, for example at the end of a cut answer. Markup of special tokens in the text
    is plain text to the teacher.

    Args:
        policy: The policy's tokenizer.
        teacher: The teacher's tokenizer, a fast one with an EOS token.
        ids: The tokens that the policy sampled.

    Returns:
        The teacher's ids, the span of each of the policy's tokens, and the range of the teacher's tokens of each span.
    """
    special = frozenset(policy.all_special_ids)
    plain = [index for index, token in enumerate(ids) if token not in special]

    def decode(some: Sequence[int]) -> str:
        return str(policy.decode(some, clean_up_tokenization_spaces=False))

    text, ends = text_of_tokens(decode, [ids[index] for index in plain])
    encoded = teacher(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    theirs = list(encoded["input_ids"])
    found, ranges = align(ends, ends_of_offsets(encoded["offset_mapping"], len(text)))
    last = {span: end for span, end in zip(found, ends, strict=True) if end is not None}
    unknown = {span for span, end in last.items() if PARTIAL in text[last.get(span - 1, 0) : end]}
    spans = [UNALIGNED] * len(ids)
    for index, span in zip(plain, found, strict=True):
        spans[index] = span if span < len(ranges) and span not in unknown else UNALIGNED
    if len(ids) > 0 and ids[-1] in special:
        spans[-1] = len(ranges)
        ranges.append((len(theirs), len(theirs) + 1))
        theirs.append(teacher.eos_token_id)
    return theirs, spans, ranges


def sum_over_spans(log_probs: Tensor, spans: Tensor) -> Tensor:
    """Sum the log-probs of the tokens of each span.

    Args:
        log_probs: [B, A] float, one per token.
        spans: [B, A] int, the span of each token. Negative: without a span.

    Returns:
        [B, A] float, at each token the sum over its span. 0 without a span.

    Example:
        >>> sum_over_spans(torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[0, 0, 1]]))
        tensor([[-3., -3., -4.]])
    """
    has_span, index = spans >= 0, spans.clamp(min=0).long()
    known = torch.where(has_span, log_probs, 0.0)
    sums = torch.zeros_like(log_probs).scatter_add(1, index, known)
    return torch.where(has_span, sums.gather(1, index), 0.0)


def add_closing_credit(advantages: Tensor, spans: Tensor) -> Tensor:
    """Add to the first token of each span the advantage of the span before.

    The teacher's tokenization depends on what follows: whether `8` is a token or the beginning of `89` is decided by
    the token after it. Without this credit, the low advantage of a span that ends too early would count only against
    the tokens before its end, and a policy would learn to end answers early.

    Args:
        advantages: [B, A] float, the same for all tokens of a span.
        spans: [B, A] int, the span of each token, in ascending order in a row. Negative: without a span.

    Returns:
        [B, A] float.

    Example:
        >>> add_closing_credit(torch.tensor([[1.0, 1.0, -5.0, 2.0]]), torch.tensor([[0, 0, 1, 2]]))
        tensor([[ 1.,  1., -4., -3.]])
    """
    known = torch.nn.functional.pad(spans, (1, 0), value=UNALIGNED)[:, :-1].cummax(dim=1).values
    is_first = (spans > known) & (spans > 0)
    by_span = advantages.new_zeros(spans.shape[0], spans.shape[1] + 1).scatter(1, spans.long() + 1, advantages)
    return advantages + torch.where(is_first, by_span.gather(1, spans.long().clamp(min=0)), 0.0)
