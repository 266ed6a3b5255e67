"""Convert `**generate_kwargs` of ColossalChat's classes to the `SamplingParams` of an engine."""

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
    """Supported options. None means unset."""

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
    # Set in ColossalChat's examples and ignored here: masks come from lengths, the cache is on, beam search is off.
    pad_token_id: Any = None
    use_cache: Any = None
    early_stopping: Any = None


KNOWN = tuple(GenerateKwargs.model_fields)
_EXAMPLES = {"temperature": "do_sample=False for greedy answers", "top_p": "top_p=0.95"}
_WHERE = "generate_kwargs"


def sampling_params(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> SamplingParams:
    """Convert `generate_kwargs` to sampling parameters.

    Args:
        options: Options by name. None means unset. `max_length` counts prompt and response tokens, `max_new_tokens`
            only response tokens. The default is 64 new tokens. `do_sample=False` is greedy. `stop` (texts) and
            `stop_token_ids` (a token id, a sequence of ids, or several sequences) end an answer in addition to EOS.
            `eos_token_id` is for `set_eos`.
        tokenizer: Decodes `stop_token_ids`. None is enough without them.

    Returns:
        Parameters for a rollout engine.

    Raises:
        UserInputError: An option is unknown, or a value is out of bounds.

    Example:
        >>> params = sampling_params({"max_new_tokens": 8, "top_p": 0.95, "do_sample": False}, None)
        >>> params.max_new_tokens, params.top_p, params.greedy
        (8, 0.95, True)
    """
    for name in options:
        if name not in KNOWN:
            raise UserInputError(
                f"unknown option {name!r}{suggestion(name, KNOWN)}", where=_WHERE, hint=f"options: {', '.join(KNOWN)}"
            )
    try:
        kwargs = GenerateKwargs.model_validate({name: plain(value) for name, value in options.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise UserInputError(
            f"{name}: {first['msg'].replace('Input should', 'should', 1)}, got {first['input']!r}",
            where=_WHERE,
            hint=f"for example {_EXAMPLES.get(name, f'{name}=64')}",
        ) from None
    greedy = kwargs.do_sample is not None and not kwargs.do_sample
    return SamplingParams(
        max_new_tokens=kwargs.max_new_tokens or kwargs.max_length or SamplingParams().max_new_tokens,
        max_length=kwargs.max_length,
        temperature=1.0 if greedy else kwargs.temperature or 1.0,
        top_k=kwargs.top_k or 0,
        top_p=kwargs.top_p or 1.0,
        stop=(*_texts(kwargs.stop), *_token_texts(kwargs.stop_token_ids, tokenizer)),
        greedy=greedy,
    )


def set_eos(model: nn.Module, eos_token_id: int | Sequence[int] | None) -> None:
    """Set the tokens that end an answer in the model's generation config, which engines read.

    Args:
        model: Policy, possibly wrapped by a strategy or PEFT. Left unchanged if its generation config is missing.
        eos_token_id: One token id or several. None leaves the config unchanged.
    """
    from rlhf_forward.logits import innermost

    config: Any = getattr(innermost(model), "generation_config", None)
    if eos_token_id is not None and config is not None:
        config.eos_token_id = list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id


def _texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _token_texts(
    stop: int | Sequence[int] | Sequence[Sequence[int]] | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[str, ...]:
    """Decode each sequence of token ids, including special tokens, for use as stop texts."""
    if stop is None:
        return ()
    if tokenizer is None:
        raise UserInputError(
            "stop_token_ids needs a tokenizer", where=_WHERE, hint="pass tokenizer=…, or single tokens as eos_token_id"
        )
    if isinstance(stop, int):
        sequences = [[stop]]
    elif all(isinstance(entry, int) for entry in stop):
        sequences = [list(cast("Sequence[int]", stop))]
    else:
        sequences = [list(cast("Sequence[int]", entry)) for entry in stop]
    return tuple(str(tokenizer.decode(ids, skip_special_tokens=False)) for ids in sequences if ids)
