"""`**generate_kwargs` of the seed's classes, as the `SamplingParams` of an engine."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from rlhf_core.errors import UserInputError
from rlhf_core.types import SamplingParams
from rlhf_core.util.did_you_mean import suggestion

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

WITHOUT_EFFECT = ("pad_token_id", "use_cache", "early_stopping")
"""Accepted from the seed's examples and ignored: masks come from lengths, the cache is on, beam search is off."""

KNOWN = (
    "max_length",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "do_sample",
    "stop",
    "stop_token_ids",
    "eos_token_id",
    *WITHOUT_EFFECT,
)
"""All accepted options."""

_WHERE = "generate_kwargs"


def sampling_params(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> SamplingParams:
    """Sampling parameters from the options; None counts as not given.

    `max_length` counts prompt and response tokens together, `max_new_tokens` the response alone; neither given: 64 new
    tokens. `do_sample=False` is greedy. `stop` (texts) and `stop_token_ids` (a token id, a sequence of them, or several
    sequences; this needs the tokenizer) end an answer besides EOS. `eos_token_id` is for `set_eos`.

    Raises `UserInputError` on an unknown option or a value out of bounds.
    """
    for name in options:
        if name not in KNOWN:
            raise UserInputError(
                f"unknown option {name!r}{suggestion(name, KNOWN)}", where=_WHERE, hint=f"known: {', '.join(KNOWN)}"
            )
    max_length = _count(options, "max_length", at_least=1)
    max_new_tokens = _count(options, "max_new_tokens", at_least=1)
    top_k = _count(options, "top_k", at_least=0)
    temperature, top_p = _number(options, "temperature"), _number(options, "top_p")
    _check(temperature is None or temperature > 0, "temperature must be > 0", "do_sample=False for greedy answers")
    _check(top_p is None or 0 < top_p <= 1, "top_p must be in (0, 1] (1 is off)", "top_p=0.95")
    do_sample = options.get("do_sample")
    greedy = do_sample is not None and not do_sample
    return SamplingParams(
        max_new_tokens=max_new_tokens or max_length or SamplingParams().max_new_tokens,
        max_length=max_length,
        temperature=1.0 if temperature is None or greedy else temperature,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        stop=(*_texts(options.get("stop")), *_token_texts(options.get("stop_token_ids"), tokenizer)),
        greedy=greedy,
    )


def set_eos(model: nn.Module, eos_token_id: int | Sequence[int] | None) -> None:
    """Add tokens that end an answer, in the model's generation config, where engines read them."""
    from rlhf_forward.forward import innermost

    config: Any = getattr(innermost(model), "generation_config", None)
    if eos_token_id is not None and config is not None:
        config.eos_token_id = list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id


def _check(fits: bool, message: str, example: str) -> None:
    if not fits:
        raise UserInputError(message, where=_WHERE, hint=f"for example {example}")


def _count(options: Mapping[str, Any], name: str, *, at_least: int) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    whole = hasattr(value, "__index__") and operator.index(value) >= at_least
    _check(whole, f"{name} must be a whole number of at least {at_least}, got {value!r}", f"{name}=64")
    return operator.index(value)


def _number(options: Mapping[str, Any], name: str) -> float | None:
    value = options.get(name)
    _check(value is None or isinstance(value, Real), f"{name} must be a number, got {value!r}", f"{name}=1.0")
    return None if value is None else float(value)


def _texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _token_texts(
    stop: int | Sequence[int] | Sequence[Sequence[int]] | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[str, ...]:
    """The text of each sequence of token ids, special tokens included, for use as stop texts."""
    if stop is None:
        return ()
    if tokenizer is None:
        raise UserInputError(
            "stop_token_ids needs a tokenizer", where=_WHERE, hint="give tokenizer=…, or single tokens as eos_token_id"
        )
    if isinstance(stop, int):
        sequences = [[stop]]
    elif all(isinstance(entry, int) for entry in stop):
        sequences = [list(cast("Sequence[int]", stop))]
    else:
        sequences = [list(cast("Sequence[int]", entry)) for entry in stop]
    return tuple(str(tokenizer.decode(ids, skip_special_tokens=False)) for ids in sequences if ids)
