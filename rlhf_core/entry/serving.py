"""A trained model as something that answers calls: behind `rlhf serve`."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ..config.sections import ModelConfig
from ..environments.chat import ChatFormat
from ..environments.conversations import reply_message, template_messages
from ..environments.endpoint import Answer, Call, CallRefused
from ..errors import DataError, RlhfError, UserInputError
from ..prompts.stream import PromptEncoder
from ..protocols import RolloutEngine
from ..runfolder.checkpoints import CheckpointStore, find_damage
from ..runfolder.folder import RunFolder
from ..types import Completion, GenerationRequest, SamplingParams
from ..util.rng import derive_seed
from .inference import open_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0
_STEP = re.compile(r"step-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenModel:
    """Which weights are served."""

    config: ModelConfig
    weights: Path | None = None
    """Folder of a checkpoint whose weights replace those that `config` names."""

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.config.path if self.weights is None else str(self.weights.parent)


def choose_model(path: str, *, best: bool = False, device: str = "auto") -> ChosenModel:
    """The weights of a run folder, or a model folder, hub name or `builtin:NAME`.

    Of a run that is done: its final model, of another its newest checkpoint; with `best`, what `checkpoint.best` chose.
    No code that a run folder names is run. Raises `UserInputError`.
    """
    folder = RunFolder(Path(path))
    if not folder.holds_run:
        if best:
            raise UserInputError("only a run has a best checkpoint", where="--best", hint="give a run folder")
        return ChosenModel(config=ModelConfig(path=path, device=device))
    folder.refuse_oddities()
    final = ChosenModel(config=ModelConfig(path=str(folder.model), device=device)) if folder.model.is_dir() else None
    if final is not None and not best and folder.read_json(folder.summary).get("status") == "done":
        return final
    checkpoint = _best(folder) if best else CheckpointStore(folder.checkpoints, keep=1).newest()
    if checkpoint is None:
        if final is not None:
            return final
        raise UserInputError(
            "this run has written no model and no checkpoint yet",
            where=path,
            hint="wait for one: checkpoint.every_episodes says when they are written",
        )
    model = folder.read_config().get("model")
    given = model if isinstance(model, dict) else {}
    try:
        kept = {key: given.get(key) for key in ("path", "lora", "chat")}
        config = ModelConfig.model_validate({**kept, "device": device})
    except ValidationError as error:
        raise DataError("does not say which model the run trains", where=str(folder.config)) from error
    return ChosenModel(config=config, weights=checkpoint / "policy")


def _best(folder: RunFolder) -> Path:
    named = folder.checkpoints / "best"
    name = named.read_text(encoding="utf-8").strip() if named.is_file() else ""
    if not _STEP.fullmatch(name):
        raise UserInputError(
            "this run has no best checkpoint",
            where=str(folder.path),
            hint="checkpoint.best in its run file names the metric that chooses one; or leave --best out",
        )
    if damage := find_damage(folder.checkpoints / name):
        raise UserInputError(damage, where=str(folder.checkpoints / name), hint="leave --best out")
    return folder.checkpoints / name


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A call that waits for the engine."""

    request: GenerationRequest
    sampling: SamplingParams
    answer: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop

    def tell(self, found: Completion | Exception) -> None:
        """From the engine's thread."""

        def settle() -> None:
            if self.answer.done():
                return
            if isinstance(found, Exception):
                self.answer.set_exception(found)
            else:
                self.answer.set_result(found)

        self.loop.call_soon_threadsafe(settle)


class ServedModel:
    """Answers calls (`Answering`) with one engine, on a thread: those that wait are sampled together."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._chat = ChatFormat(tokenizer, eos_token_ids=engine.eos_token_ids)
        self._encoder = PromptEncoder(tokenizer)
        self._count = 0
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
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
        loop = asyncio.get_running_loop()
        job = _Job(request, self._sampling(call, ends), loop.create_future(), loop)
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        completion = await job.answer
        text = str(self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))
        marked = str(self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=False))
        calls = self._chat.tool_format().parse(marked) if call.tools else ()
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
        while jobs := self._next_jobs():
            try:
                self._sample(jobs)
            except Exception as error:  # an engine of a plugin may raise anything
                logger.warning("sampling failed", exc_info=True)
                what = error.message if isinstance(error, RlhfError) else type(error).__name__
                for job in jobs.values():
                    job.tell(CallRefused(500, "engine_error", f"the engine failed: {what}"))

    def _next_jobs(self) -> dict[int, _Job]:
        """Those that can be sampled together with the one that waits longest, by sample id; none when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return {}
            chosen: dict[int, _Job] = {}
            for job in self._jobs:
                if job.sampling == self._jobs[0].sampling:
                    chosen.setdefault(job.request.sample_id, job)
            taken = {id(job) for job in chosen.values()}
            self._jobs = [job for job in self._jobs if id(job) not in taken]
        return chosen

    def _sample(self, jobs: dict[int, _Job]) -> None:
        asked = [job for job in jobs.values() if not job.answer.done()]
        if not asked:
            return
        left = {job.request.sample_id: job for job in asked}
        for completion in self._engine.generate([job.request for job in asked], asked[0].sampling):
            left.pop(completion.sample_id).tell(completion)
            if self._closed or all(job.answer.done() for job in left.values()):
                return  # nobody waits for the others


def serve_model(chosen: ChosenModel, *, engine: str, seed: int, max_new_tokens: int) -> ServedModel:
    """Load it. seed: of sampling. Raises `UserInputError`."""
    opened, tokenizer = open_engine(chosen.config, engine, seed, weights=chosen.weights)
    return ServedModel(opened, tokenizer, max_new_tokens=max_new_tokens)
