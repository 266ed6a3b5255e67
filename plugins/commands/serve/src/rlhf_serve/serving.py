"""The model of `rlhf serve`: answers calls with an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config import ModelConfig
from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.prompts import PromptEncoder
from rlhf_core.protocols import RolloutEngine
from rlhf_core.runfolder import RunFolder
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_core.util import derive_seed
from rlhf_episodes import Answer, Call, CallRefused, ChatFormat, reply_message, template_messages
from rlhf_models import EngineThread, open_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_SECONDS = 10.0


class ServedModel:
    """A `KeyOwner` that answers calls with one engine on a thread (`EngineThread`)."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._chat = ChatFormat(tokenizer, eos_token_ids=engine.eos_token_ids)
        self._encoder = PromptEncoder(tokenizer)
        self._count = 0
        self._thread = EngineThread(engine)

    async def answer(self, call: Call) -> Answer:
        """Answer a call. Raises `CallRefused` if its conversation cannot be encoded or is too long."""
        prompt_ids = self._encode(call)
        limit = self._limit(call, len(prompt_ids))
        ends = self._chat.ends(self._engine.eos_token_ids) if call.text is None else ()
        number = self._count
        self._count += 1
        request = GenerationRequest(
            sample_id=number if call.seed is None else derive_seed(0, "seed of a call", call.seed),
            prompt_ids=prompt_ids,
            max_new_tokens=limit,
        )
        (future,) = self._thread.ask([request], self._sampling(call, ends))
        completion = await asyncio.wrap_future(future)  # canceled together with the caller
        text = str(self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))
        full_text = str(self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=False))
        calls = self._chat.tool_format().parse(full_text, call.tools) if call.tools else ()
        message = reply_message(text, calls, call.stop, self._chat.tool_format)
        return Answer(
            text=message.content,
            tool_calls=message.tool_calls,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(completion.token_ids),
            turn=number,
        )

    def close(self) -> None:
        """Close the engine and drop answers in progress."""
        self._thread.close(join_seconds=_END_SECONDS)

    def _encode(self, call: Call) -> tuple[int, ...]:
        try:
            if call.text is not None:
                return self._encoder.encode(call.text)
            return self._chat.open(template_messages(call.messages, self._chat.tool_format), call.tools)[1]
        except RlhfError as error:
            raise CallRefused(400, "invalid_request", error.message) from error

    def _limit(self, call: Call, num_prompt_tokens: int) -> int:
        context = self._engine.context_tokens
        limit = self._max_new_tokens if context is None else min(self._max_new_tokens, context - num_prompt_tokens)
        if limit < 1:
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
    loaded, tokenizer = open_engine(config, engine, seed, in_flight=True)
    return ServedModel(loaded, tokenizer, max_new_tokens=max_new_tokens)
