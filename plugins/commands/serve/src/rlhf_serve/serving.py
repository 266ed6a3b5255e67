"""The model of `rlhf serve`: answers calls with an engine, and computes log-probs with the model itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config import ModelConfig
from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.models import model_kind_of
from rlhf_core.plugins import load
from rlhf_core.prompts import PromptEncoder
from rlhf_core.protocols import RolloutEngine
from rlhf_core.runfolder import RunFolder
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_core.util import derive_seed
from rlhf_episodes import (
    Answer,
    AnswerStructures,
    Call,
    CallRefused,
    ChatFormat,
    TokenLogprob,
    first_stop,
    reply_message,
    template_messages,
)
from rlhf_forward import ScoredRow, TokenScore, score_rows, vocabulary_size
from rlhf_models import EngineThread, OpenEngine, open_engine

from .logprobs import describe
from .seeing import SeeingEncoder, has_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_SECONDS = 10.0
_MAX_LOGPROBS = 2**21
"""Maximum number of log-probs in a response. One takes about 0.5 KiB of memory until the response is sent."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A call, encoded, and the request that answers it."""

    call: Call
    number: int
    """Number of the answer since the start of the server."""
    request: GenerationRequest
    sampling: SamplingParams


class _Encoded(NamedTuple):
    """An encoded prompt."""

    prompt_ids: tuple[int, ...]
    inputs: Mapping[str, Any]
    """Further inputs of the model, as in `GenerationRequest.inputs`."""


class ServedModel:
    """A `BatchKeyOwner` that answers calls with one engine on a thread (`EngineThread`)."""

    def __init__(self, opened: OpenEngine, *, max_new_tokens: int, engine_sees: bool = False) -> None:
        self._engine: RolloutEngine = opened.engine
        self._tokenizer: PreTrainedTokenizerBase = opened.tokenizer
        self._policy = opened.policy
        self._max_new_tokens = max_new_tokens
        self._chat = ChatFormat(self._tokenizer, eos_token_ids=self._engine.eos_token_ids)
        self._structures = AnswerStructures(self._engine, self._tokenizer)
        self._encoder = PromptEncoder(self._tokenizer)
        kind = model_kind_of(opened.policy)
        self._seeing = SeeingEncoder(self._tokenizer, kind, self._chat, engine_sees=engine_sees)
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="images")  # one image in memory at a time
        self._count = 0
        self._thread = EngineThread(self._engine)

    async def answer(self, call: Call) -> Answer:
        """Answer a call. Raises `CallRefused` if its conversation cannot be encoded or is too long."""
        (answer,) = await self.answer_all([call])
        return answer

    async def count_tokens(self, call: Call) -> int:
        """Count the prompt's tokens. Raises `CallRefused` if the conversation cannot be encoded."""
        return len((await self._prompts([call]))[_key(call)].prompt_ids)

    async def answer_all(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer calls in one batch. Raises `CallRefused`, before any is answered, if one of them is invalid."""
        # All calls of a request have the same structure.
        options = await self._structures.options(calls[0], self._chat) if calls else {}
        works = self._works(calls, await self._prompts(calls), options)
        _check_logprobs(works)
        completions = await self._complete(works)
        tokens = await self._tokens(works, completions)
        return [self._answer(*each) for each in zip(works, completions, tokens, strict=True)]

    async def _prompts(self, calls: Sequence[Call]) -> dict[object, _Encoded]:
        """Encode the prompt of each call. Answers to one prompt (`n`) share its messages and tools."""
        prompts: dict[object, _Encoded] = {}
        for call in calls:
            if (key := _key(call)) in prompts:
                continue
            if has_images(call):
                prompt = await asyncio.get_running_loop().run_in_executor(self._decoding, self._seeing.prompt, call)
                prompts[key] = _Encoded(tuple(prompt.prompt_ids), prompt.columns.model_inputs)
            else:
                prompts[key] = _Encoded(self._encode(call), {})
        return prompts

    def _works(
        self, calls: Sequence[Call], prompts: Mapping[object, _Encoded], options: Mapping[str, Any]
    ) -> list[_Work]:
        works: list[_Work] = []
        for call in calls:
            prompt_ids, inputs = prompts[_key(call)]
            limit = self._limit(call, len(prompt_ids))
            ends = self._chat.ends(self._engine.eos_token_ids) if call.messages else ()
            number = self._count + len(works)
            sampling = self._sampling(call, ends)
            seed = None if sampling.greedy else call.seed  # calls with equal sample ids wait for each other
            sample_id = number if seed is None else derive_seed(0, "seed of a call", seed)
            request = GenerationRequest(
                sample_id=sample_id, prompt_ids=prompt_ids, max_new_tokens=limit, options=options, inputs=inputs
            )
            works.append(_Work(call, number, request, sampling))
        self._count += len(works)
        return works

    async def _complete(self, works: Sequence[_Work]) -> list[Completion | None]:
        """Return the completions, None for a call without tokens to sample."""
        batches: dict[SamplingParams, list[_Work]] = {}
        for work in works:
            if work.request.max_new_tokens:
                batches.setdefault(work.sampling, []).append(work)
        futures: dict[_Work, Future[Completion]] = {}
        for sampling, batch in batches.items():
            requests = [work.request for work in batch]
            futures |= zip(batch, self._thread.ask(requests, sampling), strict=True)
        try:  # canceled together with the caller
            found = await asyncio.gather(*map(asyncio.wrap_future, futures.values()))
        finally:
            for future in futures.values():  # after a failure, the others are not needed
                future.cancel()
        completions = dict(zip(futures, found, strict=True))
        return [completions.get(work) for work in works]

    async def _tokens(
        self, works: Sequence[_Work], completions: Sequence[Completion | None]
    ) -> list[tuple[TokenLogprob, ...] | None]:
        """Return the log-probs that each call requests, None for a call without them."""
        wanted = [index for index, work in enumerate(works) if work.call.top_logprobs is not None]
        if not wanted:
            return [None] * len(works)
        rows: list[ScoredRow] = []
        for index in wanted:
            prompt_ids, completion = works[index].request.prompt_ids, completions[index]
            first = 1 if works[index].call.echo else len(prompt_ids)
            rows.append(ScoredRow((*prompt_ids, *(completion.token_ids if completion else ())), first))
        num_top = max(works[index].call.top_logprobs or 0 for index in wanted)

        has_left = threading.Event()

        def run(work: Callable[[], list[TokenScore]]) -> list[TokenScore]:
            """Call `work` between two decoding steps, so that other answers progress."""
            if has_left.is_set():
                raise CancelledError
            return self._thread.run(work)

        def score() -> list[tuple[TokenLogprob, ...]]:
            found = zip(wanted, rows, score_rows(self._policy, rows, num_top, run), strict=True)
            return [self._describe(works[index], row, each) for index, row, each in found]

        try:
            tokens = dict(zip(wanted, await asyncio.to_thread(score), strict=True))
        finally:
            has_left.set()
        return [tokens.get(index) for index in range(len(works))]

    def _describe(self, work: _Work, row: ScoredRow, scores: Sequence[TokenScore]) -> tuple[TokenLogprob, ...]:
        prompt_ids = work.request.prompt_ids
        answer_ids = row.token_ids[len(prompt_ids) :]
        num_of_prompt = len(scores) - len(answer_ids)
        prompt = describe(self._tokenizer, prompt_ids, scores[:num_of_prompt]) if work.call.echo else ()
        return (*prompt, *describe(self._tokenizer, answer_ids, scores[num_of_prompt:]))

    def _answer(self, work: _Work, completion: Completion | None, tokens: tuple[TokenLogprob, ...] | None) -> Answer:
        call, token_ids = work.call, list(completion.token_ids) if completion else []
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        full_text = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        tool_calls = self._chat.tool_format().parse(full_text, call.tools) if call.tools else ()
        message = reply_message(self._chat.content(token_ids, tool_calls), tool_calls, call.stop)
        return Answer(
            text=(self._prompt_text(call) if call.echo else "") + message.content,
            tool_calls=message.tool_calls,
            finish_reason=completion.finish_reason if completion else "length",
            stop_text=first_stop(text, call.stop),
            prompt_tokens=len(work.request.prompt_ids),
            completion_tokens=len(token_ids),
            turn=work.number,
            tokens=tokens,
        )

    def _prompt_text(self, call: Call) -> str:
        if call.text is not None:
            return call.text
        return str(self._tokenizer.decode(list(call.token_ids or ()), skip_special_tokens=False))

    def close(self) -> None:
        """Close the engine and drop answers in progress."""
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._thread.close(join_seconds=_END_SECONDS)

    def _encode(self, call: Call) -> tuple[int, ...]:
        if call.token_ids is not None:
            if (largest := max(call.token_ids)) >= (size := vocabulary_size(self._policy)):
                raise CallRefused(400, "invalid_request", f"prompt: token ids are below {size}, got {largest}")
            return call.token_ids
        try:
            if call.text is not None:
                return self._encoder.encode(call.text)
            return self._chat.open(template_messages(call.messages, self._chat.tool_format), call.tools)[1]
        except RlhfError as error:
            raise CallRefused(400, "invalid_request", error.message) from error

    def _limit(self, call: Call, num_prompt_tokens: int) -> int:
        context = self._engine.context_tokens
        limit = self._max_new_tokens if context is None else min(self._max_new_tokens, context - num_prompt_tokens)
        if limit < (0 if call.max_tokens == 0 else 1):
            message = f"the conversation has {num_prompt_tokens} tokens, the model's limit is {context}"
            raise CallRefused(400, "context_length_exceeded", message)
        return limit if call.max_tokens is None else min(limit, call.max_tokens)

    def _sampling(self, call: Call, ends: Sequence[str]) -> SamplingParams:
        temperature = 1.0 if call.temperature is None else call.temperature
        top_p = 1.0 if call.top_p is None else call.top_p
        greedy = temperature == 0 or top_p == 0
        return SamplingParams(
            max_new_tokens=self._max_new_tokens,
            temperature=1.0 if greedy else temperature,
            top_p=1.0 if greedy else top_p,
            stop=(*call.stop, *ends),
            greedy=greedy,
        )


def _key(call: Call) -> object:
    """Return a key that calls with the same prompt share."""
    return id(call.messages), id(call.tools), call.text, call.token_ids


def _check_logprobs(works: Sequence[_Work]) -> None:
    """Raise `CallRefused` if the response might have too many log-probs."""
    count = 0
    for work in works:
        if (num_top := work.call.top_logprobs) is not None:
            num_tokens = (work.request.max_new_tokens or 0) + (len(work.request.prompt_ids) if work.call.echo else 0)
            count += num_tokens * (1 + num_top)
    if count > _MAX_LOGPROBS:
        message = f"the response might have {count} log-probs, the limit is {_MAX_LOGPROBS}"
        raise CallRefused(400, "invalid_request", f"{message}: set a smaller n, max_tokens or top_logprobs")


def model_of(path: str) -> str:
    """Return the model folder of a finished run, or any other path unchanged.

    Raises `UserInputError` if the run is still in progress or has not written a model.
    """
    folder = RunFolder(Path(path))
    if not folder.holds_run:
        return path
    folder.refuse_oddities()
    # A resumed run that is still running has the model of its earlier end.
    if not folder.model.is_dir() or folder.read_json(folder.summary).get("status") == "running":
        raise UserInputError(
            "this run is still in progress, or has not written a model yet",
            where=path,
            hint=f"serve its newest checkpoint: rlhf export {path} --to DIR, then: rlhf serve DIR",
        )
    return str(folder.model)


def serve_model(config: ModelConfig, *, engine: str, seed: int, max_new_tokens: int) -> ServedModel:
    """Load a model into an engine. Raises `UserInputError`.

    Args:
        config: path and device of the model.
        engine: name of the engine.
        seed: seed of sampling.
        max_new_tokens: maximum length of an answer in tokens.
    """
    sees = load("engines", engine).component.model_inputs
    opened = open_engine(config, engine, seed, in_flight=True)
    return ServedModel(opened, max_new_tokens=max_new_tokens, engine_sees=sees)
