"""The engine `http`: a `RolloutEngine` whose server gets the weights of this process's module as files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from rlhf_core.components import EngineContext
from rlhf_core.errors import SyncError
from rlhf_core.protocols import InFlightEngine, SamplingRequest
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_models import GenerationJob, check_same_weights, checked_completion, eos_token_ids, is_lora
from rlhf_strategies import plain_shards
from rlhf_web import environment_key

from .config import NAME, WHERE, HttpEngineConfig
from .protocol import ServerAnswer, ServerProtocol
from .server import RemoteServer, Weights
from .sglang import SglangProtocol
from .vllm import VllmProtocol
from .weights import WeightsFolder

T = TypeVar("T")
_PROTOCOLS: dict[str, type[ServerProtocol]] = {"vllm": VllmProtocol, "sglang": SglangProtocol}
_POLL_SECONDS = 0.01
"""Time between two calls of `between`, which brings new requests and weights."""
_JOIN_SECONDS = 10.0


class HttpEngine:
    """An `InFlightEngine` over a server. The server's copy of the weights is updated by `weights_updated`."""

    def __init__(self, config: HttpEngineConfig, context: EngineContext) -> None:
        """Reserve a server and wait until it is reachable.

        Raises `ConfigError` if none is free or it lacks an endpoint, `UserInputError` if the key is not set, or
        `EngineLostError` if it stays unreachable.
        """
        self._config = config
        self._module = context.model
        self._seed = context.seed
        self.policy_version = 0
        self._versions: dict[str, int] = {}
        """Policy version of each label."""
        model: Any = context.model
        base = model.get_base_model() if is_lora(model) else model
        self.eos_token_ids = eos_token_ids(base, context.tokenizer)
        key = None if config.api_key_env is None else environment_key(config.api_key_env, where="engine.api_key_env")
        self._folder = WeightsFolder.claim(config)
        self._server = RemoteServer(self._folder.url, config, _PROTOCOLS[config.kind](), key)
        self._loop = _Loop()
        try:
            self.context_tokens: int | None = self._loop.run(self._server.start())
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Check all requests, then yield completions as they finish (see `RolloutEngine.generate`).

        Raises `DataError` if a prompt leaves no room for an answer, and `ConfigError` for a truncation that the server
        cannot report. Iterating raises `EngineLostError` if the server stays lost, `DivergenceError`, and `SyncError`
        if weights arrive before the last completion.
        """
        jobs = [self._job(request, sampling) for request in requests]
        return self._single_version_completions(jobs) if jobs else iter(())

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Answer the requests that `between` returns. It is called often, not before each of the server's steps.

        Raises the errors of `generate` while iterating.
        """
        return self._completions(lambda: [self._job(*request) for request in between()], poll_seconds=_POLL_SECONDS)

    def _job(self, request: GenerationRequest, sampling: SamplingParams) -> GenerationJob:
        return GenerationJob.of(request, sampling, context_tokens=self.context_tokens, seed=self._seed, name=NAME)

    def _single_version_completions(self, jobs: Sequence[GenerationJob]) -> Iterator[Completion]:
        version = self.policy_version
        batches = iter([jobs])
        for completion in self._completions(lambda: next(batches, ()), poll_seconds=None):
            check_same_weights(version, self.policy_version, where=WHERE)
            yield completion

    def _completions(
        self, joining: Callable[[], Sequence[GenerationJob]], *, poll_seconds: float | None
    ) -> Iterator[Completion]:
        """Answer the jobs that `joining` returns, called at least every `poll_seconds`, until all are answered."""
        if not self._versions:
            self._load(self.policy_version)
            self._loop.run(self._server.check_logprobs([min(self.eos_token_ids, default=0)]))
        open_jobs: dict[Future[ServerAnswer], GenerationJob] = {}
        eos_ids = sorted(self.eos_token_ids)
        try:
            while True:
                for job in joining():
                    open_jobs[self._loop.submit(self._server.answer(job, eos_ids))] = job
                if not open_jobs:
                    return
                for done in wait(open_jobs, poll_seconds, return_when=FIRST_COMPLETED).done:
                    yield self._completion(open_jobs.pop(done), done.result())
        finally:
            for future in open_jobs:
                future.cancel()

    def _completion(self, job: GenerationJob, answer: ServerAnswer) -> Completion:
        """Build a completion. Raises `DivergenceError` if a log-prob is not finite."""
        assert answer.finish_reason is not None
        completion = Completion(
            sample_id=job.sample_id,
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            finish_reason=answer.finish_reason,
            policy_version=self.policy_version,
            support_ids=answer.support_ids,
            branch=job.branch,
            num_reused=answer.num_reused,
        )
        return checked_completion(completion, [self._versions[label] for label in answer.labels], where=WHERE)

    def weights_updated(self, version: int) -> None:
        """Write the module's weights, now of `version`, with adapters merged, and let the server load them.

        Raises `SyncError` if it rejects them, or `EngineLostError`. The engine is then closed, since the server may
        hold a mix of old and new weights.
        """
        self._load(version)
        self.policy_version = version

    def _load(self, version: int) -> None:
        label = self._server.next_label()
        self._versions[label] = version
        try:
            folder = self._folder.write(label, plain_shards(self._module, self._config.max_shard_bytes))
            self._loop.run(self._server.update(Weights(label, folder)))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise SyncError(
                    f"cannot write the weights: {error}", where="engine.weights_folder", hint="is the disk full?"
                ) from error
            raise
        self._folder.keep_only(label)

    def close(self) -> None:
        """Release the server, which keeps running, and remove the files of weights."""
        self._loop.close(self._server.aclose)
        self._folder.close()


class _Loop:
    """An event loop on its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-http", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end. The deadlines are those of the work."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # interrupted
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all work, run `last`, and end the thread. Does nothing the second time."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):  # connections that do not close in time end with the process
            self.submit(_cancel_all(last)).result(_JOIN_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_SECONDS)
        self._loop.close()


async def _cancel_all(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await last()


def build(config: HttpEngineConfig, context: EngineContext) -> InFlightEngine:
    """Build the engine `http`."""
    return HttpEngine(config, context)
