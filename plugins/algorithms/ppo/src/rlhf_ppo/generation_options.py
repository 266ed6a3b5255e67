"""`**generate_kwargs` of the seed classes, as the `SamplingParams` of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from rlhf_core.did_you_mean import suggestion
from rlhf_core.errors import UserInputError
from rlhf_core.types import SamplingParams

KNOWN = (
    "max_length",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "do_sample",
    "stop",
    "stop_token_ids",
)
"""Every option that is understood; each of them acts."""

_WHERE = "generate_kwargs"


def sampling_params(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """How to sample. `max_length` counts prompt and response together, `max_new_tokens` the response alone.

    Neither given: 64 new tokens. `do_sample=False` is greedy. `stop_token_ids` (a token id, a sequence of them, or
    several sequences) and `stop` (texts) end an answer besides EOS. Raises `UserInputError` on an unknown option or a
    value out of bounds.
    """
    for name in options:
        if name not in KNOWN:
            raise UserInputError(
                f'"{name}" is no option of generation{suggestion(name, KNOWN)}',
                where=_WHERE,
                hint=f"known: {', '.join(KNOWN)}",
            )
    max_length = _positive(options, "max_length")
    max_new_tokens = _positive(options, "max_new_tokens")
    temperature, top_p, top_k = options.get("temperature"), options.get("top_p"), int(options.get("top_k") or 0)
    greedy = not options.get("do_sample", True)
    _check(temperature is None or temperature > 0, "temperature must be > 0", "do_sample=False for greedy answers")
    _check(top_k >= 0, "top_k must be >= 0 (0 is off)", "top_k=50")
    _check(top_p is None or 0 < top_p <= 1, "top_p must be in (0, 1] (1 is off)", "top_p=0.95")
    return SamplingParams(
        max_new_tokens=max_new_tokens or max_length or SamplingParams().max_new_tokens,
        max_length=max_length,
        temperature=1.0 if temperature is None or greedy else float(temperature),
        top_k=top_k,
        top_p=1.0 if top_p is None else float(top_p),
        stop=(*_texts(options.get("stop")), *_token_texts(options.get("stop_token_ids"), tokenizer)),
        greedy=greedy,
    )


def _check(fits: bool, message: str, example: str) -> None:
    if not fits:
        raise UserInputError(message, where=_WHERE, hint=f"for example {example}")


def _positive(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    _check(value is None or int(value) >= 1, f"{name} must be at least 1, got {value}", f"{name}=64")
    return None if value is None else int(value)


def _texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _token_texts(
    stop: int | Sequence[int] | Sequence[Sequence[int]] | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, ...]:
    """Each sequence of token ids as its text, special tokens included, as engines look for it."""
    if stop is None:
        return ()
    if isinstance(stop, int):
        sequences = [[stop]]
    elif all(isinstance(entry, int) for entry in stop):
        sequences = [list(cast("Sequence[int]", stop))]
    else:
        sequences = [list(cast("Sequence[int]", entry)) for entry in stop]
    return tuple(str(tokenizer.decode(ids, skip_special_tokens=False)) for ids in sequences if ids)
