"""Maximum length of an answer."""

from __future__ import annotations

from rlhf_core import GenerationRequest, SamplingParams
from rlhf_core.errors import DataError


def answer_limit(
    request: GenerationRequest, sampling: SamplingParams, context_tokens: int | None, *, engine: str
) -> int:
    """Return the maximum number of tokens to sample for a request, at least 1.

    Args:
        request: the request, which may have its own `max_new_tokens`.
        sampling: sampling parameters with `max_new_tokens` and `max_length`.
        context_tokens: maximum sequence length of the model, prompt included, or None if unbounded.
        engine: label of the engine, for error messages.

    Raises:
        DataError: the prompt is empty or leaves no room for one token.

    Example:
        >>> request = GenerationRequest(sample_id=0, prompt_ids=(5, 6, 7))
        >>> answer_limit(request, SamplingParams(max_new_tokens=64), context_tokens=32, engine="engine hf")
        29
    """
    length = len(request.prompt_ids)
    where = f"{engine}, sample {request.sample_id}"
    if length == 0:
        raise DataError("the prompt is empty", where=where, hint="use prompts with at least one token")
    bounds = [each for each in (sampling.max_length, context_tokens) if each is not None]
    if bounds and min(bounds) <= length:
        raise DataError(
            f"a prompt of {length} tokens leaves no room for an answer (at most {min(bounds)} tokens together)",
            where=where,
            hint="lower prompts.max_prompt_tokens",
        )
    limit = min([sampling.max_new_tokens, *(bound - length for bound in bounds)])
    return limit if request.max_new_tokens is None else min(limit, request.max_new_tokens)
