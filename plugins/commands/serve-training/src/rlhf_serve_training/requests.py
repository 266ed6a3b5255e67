"""Requests for samples and checkpoints, checked against the limits."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from tinker import types

from rlhf_core.types import SamplingParams
from rlhf_core.util import derive_seed

from .adapters import AdapterSpec
from .limits import Limits
from .sampling import SampleWork
from .wire import InvalidRequest

TRAINING_KINDS: Mapping[str, type[Any]] = {
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "load_weights": types.LoadWeightsRequest,
}
"""Requests in the order of a model's requests, except for those with data."""
_MAX_STOPS, _MAX_STOP_CHARACTERS = 64, 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the base model that requests are checked against."""

    vocabulary_size: int
    context_tokens: int | None
    eos_token_ids: Collection[int]
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """A request for samples, ready for the ranks."""

    prompt_ids: tuple[int, ...]
    works: tuple[SampleWork, ...]
    prompt_logprobs: int | None
    """Number of last prompt tokens whose log-probs are computed. None if they are not requested."""
    top_prompt: int
    top_sample: int


def check_name(name: str | None) -> str:
    """Return the name of a checkpoint. Raises `InvalidRequest`."""
    if name is None or not _NAME.fullmatch(name):
        raise InvalidRequest("a checkpoint's name has letters, digits, dots, dashes and underscores, at most 100")
    return name


def read(kind: type[Any], body: bytes) -> Any:
    """Parse a JSON body as a message of the API. Raises `InvalidRequest`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequest(f"{where}: {first['msg']}") from None


def sample_order(request: types.SampleRequest, request_id: str, facts: ModelFacts, limits: Limits) -> SampleOrder:
    """Check a request for samples. Raises `InvalidRequest`."""
    prompt_ids = tuple(token_ids(request.prompt, facts))
    count, params = request.num_samples, request.sampling_params
    if not 1 <= count <= limits.samples_per_request:
        raise InvalidRequest(f"num_samples is between 1 and {limits.samples_per_request}, not {count}")
    if request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k:
        raise InvalidRequest("target_prompt_logprobs and prompt_alt_tokens_k are not offered")
    if request.record_stability_info:
        raise InvalidRequest("record_stability_info is for stable_reinforce, which is not offered")
    for name, value in (("prompt", request.topk_prompt_logprobs), ("sample", request.topk_sample_logprobs)):
        if not 0 <= value <= limits.top_logprobs:
            raise InvalidRequest(f"topk_{name}_logprobs is between 0 and {limits.top_logprobs}, not {value}")
    room = None if facts.context_tokens is None else facts.context_tokens - len(prompt_ids)
    if room is not None and room < 1:
        raise InvalidRequest(f"the prompt has {len(prompt_ids)} tokens, the model's context {facts.context_tokens}")
    max_tokens = params.max_tokens if params.max_tokens is not None else room
    if max_tokens is None or max_tokens < 1:
        raise InvalidRequest("max_tokens is at least 1")
    max_tokens = max_tokens if room is None else min(max_tokens, room)
    if count * max_tokens > limits.request_tokens:
        if params.max_tokens is not None or limits.request_tokens < count:
            text = f"{count} samples of {max_tokens} tokens are more than {limits.request_tokens} tokens in one request"
            raise InvalidRequest(f"{text}: send several requests, or set a lower max_tokens")
        max_tokens = int(limits.request_tokens) // count
    sampling = _sampling(params, max_tokens, facts)
    # Requests without a seed differ by their ids, so that a request that is made again samples the same.
    own = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:6], "big")
    key = derive_seed(0, "sample", own if params.seed is None else params.seed, params.seed is None)
    works = [SampleWork(key, index, prompt_ids, max_tokens, sampling) for index in range(count)]
    last = len(prompt_ids) - 1
    if request.prompt_logprobs_last_n is not None:
        last = min(last, request.prompt_logprobs_last_n)
    wants_prompt = bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0
    return SampleOrder(
        prompt_ids,
        tuple(works),
        last if wants_prompt else None,
        request.topk_prompt_logprobs,
        request.topk_sample_logprobs,
    )


def num_samples(body: bytes) -> int:
    """Return the number of sequences of a request for samples, 1 if it is not valid."""
    try:
        return max(1, int(json.loads(body).get("num_samples", 1)))
    except (ValueError, TypeError, AttributeError):
        return 1


def new_spec(request: types.CreateModelRequest, max_rank: int) -> AdapterSpec:
    """Return the choices of a request for a new model. Raises `InvalidRequest`."""
    lora = request.lora_config
    if lora is None:
        raise InvalidRequest("only adapters are trained: set lora_config")
    if not 1 <= lora.rank <= max_rank:
        raise InvalidRequest(f"the rank {lora.rank} is not between 1 and {max_rank} (--max-rank)")
    if not (lora.train_attn or lora.train_mlp):
        raise InvalidRequest("train_attn and train_mlp are both false: nothing would be trained")
    if request.optimizer_config.type != "adamw":
        raise InvalidRequest(f"the optimizer {request.optimizer_config.type!r} is not offered, only adamw")
    seed = lora.seed or 0
    if not 0 <= seed < 2**63:
        raise InvalidRequest(f"the seed is between 0 and 2^63 - 1, not {seed}")
    return AdapterSpec(lora.rank, seed, lora.train_attn, lora.train_mlp)


def token_ids(prompt: types.ModelInput, facts: ModelFacts) -> list[int]:
    """Return the tokens of a prompt. Raises `InvalidRequest` for other chunks, and for ids that do not exist."""
    ids: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise InvalidRequest(f"a chunk of the kind {chunk.type} is not supported, only encoded text")
        ids += chunk.tokens
    if not ids:
        raise InvalidRequest("the prompt has no tokens")
    check_ids(min(ids), max(ids), facts)
    return ids


def check_ids(smallest: int, largest: int, facts: ModelFacts) -> None:
    """Check that token ids exist. Raises `InvalidRequest`."""
    if smallest < 0 or largest >= facts.vocabulary_size:
        wrong = smallest if smallest < 0 else largest
        raise InvalidRequest(f"the token {wrong} does not exist: ids are between 0 and {facts.vocabulary_size - 1}")


def _sampling(params: types.SamplingParams, max_tokens: int, facts: ModelFacts) -> SamplingParams:
    if not (0 <= params.temperature < math.inf and 0 < params.top_p <= 1 and params.top_k >= -1):
        raise InvalidRequest("temperature is at least 0, top_p in (0, 1], and top_k at least 1, or -1 for no limit")
    greedy = params.temperature == 0
    return SamplingParams(
        max_new_tokens=max_tokens,
        temperature=1.0 if greedy else params.temperature,
        top_k=0 if greedy else max(params.top_k, 0),
        top_p=1.0 if greedy else params.top_p,
        stop=_stop_texts(params.stop, facts),
        greedy=greedy,
    )


def _stop_texts(stop: Any, facts: ModelFacts) -> tuple[str, ...]:
    """Stop texts of the engine. EOS always ends a sample. A token's id becomes its text."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = [stop]
    if not stop:
        raise InvalidRequest("stop=[] would disable EOS, which is not offered: leave stop out")
    if len(stop) > _MAX_STOPS:
        raise InvalidRequest(f"there are {len(stop)} stop sequences, the limit is {_MAX_STOPS}")
    texts = []
    for each in stop:
        if isinstance(each, int):
            check_ids(each, each, facts)
            if each in facts.eos_token_ids:
                continue
            each = facts.tokenizer.decode([each], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not 0 < len(each) <= _MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"a stop text has between 1 and {_MAX_STOP_CHARACTERS} characters")
        texts.append(each)
    return tuple(texts)
