"""How long an answer may become."""

from __future__ import annotations

from rlhf_core import GenerationRequest, SamplingParams
from rlhf_core.errors import DataError


def answer_limit(
    request: GenerationRequest, sampling: SamplingParams, context_tokens: int | None, *, engine: str
) -> int:
    """Most tokens to sample for a request, at least 1. context_tokens: the longest sequence; None has no bound.

    Raises `DataError` for a prompt that is empty or leaves no room for one token.
    """
    length = len(request.prompt_ids)
    where = f"{engine}, sample {request.sample_id}"
    if length == 0:
        raise DataError("the prompt has no token", where=where, hint="give the model something to continue")
    bounds = [each for each in (sampling.max_length, context_tokens) if each is not None]
    if bounds and min(bounds) <= length:
        raise DataError(
            f"a prompt of {length} tokens leaves no room for an answer ({min(bounds)} tokens at most together)",
            where=where,
            hint="lower prompts.max_prompt_tokens",
        )
    limit = min([sampling.max_new_tokens, *(bound - length for bound in bounds)])
    return limit if request.max_new_tokens is None else min(limit, request.max_new_tokens)
