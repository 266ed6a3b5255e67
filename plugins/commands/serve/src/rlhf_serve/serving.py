"""A trained model as something that answers calls: behind `rlhf serve`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config import ModelConfig
from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.prompts import PromptEncoder
from rlhf_core.protocols import Asked, InFlightEngine, RolloutEngine
from rlhf_core.runfolder import RunFolder
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_core.util import derive_seed
from rlhf_episodes import Answer, Call, CallRefused, ChatFormat, reply_message, template_messages
from rlhf_models import open_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A call that waits for the engine."""

    request: GenerationRequest
    sampling: SamplingParams
    answer: Future[Completion]
    """Canceled where no one waits for it any more."""

    def tell(self, found: Completion | Exception) -> None:
        if not self.answer.set_running_or_notify_cancel():
            return
        if isinstance(found, Exception):
            self.answer.set_exception(found)
        else:
            self.answer.set_result(found)


class ServedModel:
    """Answers calls (`Answering`) with one engine, on a thread.

    A call joins those that are being sampled; with an engine that takes none on the way, it waits for the next batch.
    """

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._chat = ChatFormat(tokenizer, eos_token_ids=engine.eos_token_ids)
        self._encoder = PromptEncoder(tokenizer)
        self._count = 0
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        """Those that wait."""
        self._open: dict[int, _Job] = {}
        """Those that the engine samples, by sample id. Of its thread."""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="serve", daemon=True)
        self._thread.start()

    async def answer(self, call: Call) -> Answer:
        """See `Answering`."""
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
        job = _Job(request, self._sampling(call, ends), Future())
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        completion = await asyncio.wrap_future(job.answer)
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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_END_SECONDS)
        self._engine.close()

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

    # What follows runs on the engine's thread.

    def _work(self) -> None:
        while self._wait():
            try:
                self._sample()
            except Exception as error:  # an engine of a plugin may raise anything
                logger.warning("sampling failed", exc_info=True)
                what = error.message if isinstance(error, RlhfError) else type(error).__name__
                for job in self._open.values():
                    job.tell(CallRefused(500, "engine_error", f"the engine failed: {what}"))
            self._open.clear()

    def _wait(self) -> bool:
        """Until a call waits; False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return not self._closed

    def _sample(self) -> None:
        in_flight = isinstance(self._engine, InFlightEngine)
        for completion in self._completions():
            self._open.pop(completion.sample_id).tell(completion)
            if self._closed or (not in_flight and all(job.answer.done() for job in self._open.values())):
                return  # no one waits for the others

    def _completions(self) -> Iterator[Completion]:
        if isinstance(self._engine, InFlightEngine):
            return self._engine.generate_in_flight(self._between)
        jobs = self._take(alike=True)
        return self._engine.generate([job.request for job in jobs], jobs[0].sampling) if jobs else iter(())

    def _between(self) -> Sequence[Asked]:
        """Before each step: drop what no one waits for any more; return what joins."""
        if (cancel := getattr(self._engine, "cancel", None)) is not None:
            for sample_id in [key for key, job in self._open.items() if self._closed or job.answer.done()]:
                cancel(sample_id)
                del self._open[sample_id]
        return [] if self._closed else [(job.request, job.sampling) for job in self._take(alike=False)]

    def _take(self, *, alike: bool) -> list[_Job]:
        """Open the jobs that wait, one for each sample id. alike: only those that are sampled as the first is."""
        taken: list[_Job] = []
        with self._changed:
            waiting = [job for job in self._jobs if not job.answer.done()]
            self._jobs = []
            for job in waiting:
                fits = not alike or job.sampling == waiting[0].sampling
                if fits and self._open.setdefault(job.request.sample_id, job) is job:
                    taken.append(job)
                else:
                    self._jobs.append(job)
        return taken


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
