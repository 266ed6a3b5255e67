"""`**generate_kwargs` of the seed's classes, as the `SamplingParams` of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_core.errors import UserInputError
from rlhf_core.types import SamplingParams
from rlhf_core.util.did_you_mean import suggestion

from .prompts import plain

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class GenerateKwargs(BaseModel):
    """The options. None counts as not given."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    max_length: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, gt=0)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    do_sample: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    eos_token_id: Any = None
    # In the seed's examples, ignored: masks come from lengths, the cache is on, beam search is off.
    pad_token_id: Any = None
    use_cache: Any = None
    early_stopping: Any = None


KNOWN = tuple(GenerateKwargs.model_fields)
_EXAMPLES = {"temperature": "do_sample=False for greedy answers", "top_p": "top_p=0.95"}
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
    try:
        given = GenerateKwargs.model_validate({name: plain(value) for name, value in options.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise UserInputError(
            f"{name}: {first['msg'].replace('Input should', 'should', 1)}, got {first['input']!r}",
            where=_WHERE,
            hint=f"for example {_EXAMPLES.get(name, f'{name}=64')}",
        ) from None
    greedy = given.do_sample is not None and not given.do_sample
    return SamplingParams(
        max_new_tokens=given.max_new_tokens or given.max_length or SamplingParams().max_new_tokens,
        max_length=given.max_length,
        temperature=1.0 if greedy else given.temperature or 1.0,
        top_k=given.top_k or 0,
        top_p=given.top_p or 1.0,
        stop=(*_texts(given.stop), *_token_texts(given.stop_token_ids, tokenizer)),
        greedy=greedy,
    )


def set_eos(model: nn.Module, eos_token_id: int | Sequence[int] | None) -> None:
    """Add tokens that end an answer, in the model's generation config, where engines read them."""
    from rlhf_forward.forward import innermost

    config: Any = getattr(innermost(model), "generation_config", None)
    if eos_token_id is not None and config is not None:
        config.eos_token_id = list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id


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
