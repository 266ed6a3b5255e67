"""A trained model as something that answers calls: behind `rlhf serve`."""

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
    """Answers calls (`KeyOwner`) with one engine, on a thread (`EngineThread`)."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._chat = ChatFormat(tokenizer, eos_token_ids=engine.eos_token_ids)
        self._encoder = PromptEncoder(tokenizer)
        self._count = 0
        self._thread = EngineThread(engine)

    async def answer(self, call: Call) -> Answer:
        """See `KeyOwner`."""
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
        (asked,) = self._thread.ask([request], self._sampling(call, ends))
        completion = await asyncio.wrap_future(asked)  # canceled where the caller is
        text = str(self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))
        marked = str(self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=False))
        calls = self._chat.tool_format().parse(marked, call.tools) if call.tools else ()
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
            message = f"the conversation has {num_prompt_tokens} tokens, the model knows {context}"
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
    """Of a run folder its model, which it has from its end on; any other path as it is. Raises `UserInputError`."""
    folder = RunFolder(Path(path))
    if not folder.holds_run:
        return path
    folder.refuse_oddities()
    if not folder.model.is_dir() or folder.read_json(folder.summary).get("status") == "running":  # resumed: an old one
        raise UserInputError(
            "this run goes on, or has written no model yet",
            where=path,
            hint=f"of its newest checkpoint: rlhf export {path} --to DIR, then: rlhf serve DIR",
        )
    return str(folder.model)


def serve_model(config: ModelConfig, *, engine: str, seed: int, max_new_tokens: int) -> ServedModel:
    """Load it. seed: of sampling. Raises `UserInputError`."""
    opened, tokenizer = open_engine(config, engine, seed, in_flight=True)
    return ServedModel(opened, tokenizer, max_new_tokens=max_new_tokens)
