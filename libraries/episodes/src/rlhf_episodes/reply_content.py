"""The part of a sampled reply before its calls, if a special token marks them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .thinking import split_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def ids_before_calls(
    tokenizer: PreTrainedTokenizerBase, sampled_ids: Sequence[int], tag: str
) -> tuple[int, ...] | None:
    """Return the ids of a reply before its calls.

    Text without special tokens does not show where calls begin, if `tag` is one of them.

    Args:
        tokenizer: The policy's tokenizer.
        sampled_ids: The reply.
        tag: Marker before calls. The reply's thought may mention it.

    Returns:
        The ids, or None if `tag` is not a special token in the reply.
    """
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if (tag_id := special.get(tag)) not in sampled_ids:
        return None
    num_thought = len(split_thought(str(tokenizer.decode(list(sampled_ids))))[0])
    places = [place for place, token in enumerate(sampled_ids) if token == tag_id]
    # Few are decoded, since a model may repeat the marker thousands of times.
    first = bisect_left(places, num_thought, key=lambda place: len(str(tokenizer.decode(list(sampled_ids[:place])))))
    return tuple(sampled_ids[: places[first]]) if first < len(places) else None
