"""The seed's `**generate_kwargs` as `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.did_you_mean import suggestion
from rlhf_core.errors import UserInputError
from rlhf_core.types import SamplingParams

_WHERE = "generate_kwargs"
_SAMPLING = ("max_length", "max_new_tokens", "temperature", "top_k", "top_p", "stop", "do_sample", "eos_token_id")
_WITHOUT_EFFECT = ("pad_token_id", "use_cache", "early_stopping")
"""Masks are known from lengths, the cache is always used, and nothing here searches beams."""


def read_generate_kwargs(options: Mapping[str, Any]) -> SamplingParams:
    """How to sample. `max_length` counts prompt and response; `eos_token_id` is read by `eos_of`.

    Raises `UserInputError` on a name or value that means nothing here.
    """
    known = (*_SAMPLING, *_WITHOUT_EFFECT)
    for name in options:
        if name not in known:
            raise UserInputError(
                f"unknown option {name!r}{suggestion(name, known)}", where=_WHERE, hint=f"known: {', '.join(known)}"
            )
    max_length = _count(options, "max_length")
    max_new_tokens = _count(options, "max_new_tokens")
    defaults = SamplingParams()
    temperature = options.get("temperature")
    if temperature is not None and not temperature > 0:
        raise UserInputError(f"temperature must be above 0, got {temperature}", where=_WHERE, hint="do_sample=False")
    top_p = options.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserInputError(f"top_p must be above 0 and at most 1, got {top_p}", where=_WHERE)
    stop = options.get("stop") or ()
    return SamplingParams(
        max_new_tokens=max_new_tokens or max_length or defaults.max_new_tokens,
        max_length=max_length,
        temperature=defaults.temperature if temperature is None else float(temperature),
        top_k=int(options.get("top_k") or 0),
        top_p=defaults.top_p if top_p is None else float(top_p),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        greedy=options.get("do_sample") is False,
    )


def _count(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise UserInputError(f"{name} must be a whole number above 0, got {value!r}", where=_WHERE)
    return value
