"""One server: answers, weight updates, and what happens when it is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import ConfigError, EngineLostError, RlhfError, SyncError
from rlhf_models import GenerationJob
from rlhf_web import ClientOptions, JsonClient, RemoteError

from .config import WHERE, HttpEngineConfig
from .protocol import Calls, ServerAnswer, ServerProtocol

logger = logging.getLogger("rlhf.engine.http")
_UNAVAILABLE = (500, 502, 503, 504)
"""Statuses of a server that is starting, ending, or whose engine died, and of a proxy in front of it."""
_MAX_RESPONSE_BYTES = 1024**3
_CONNECT_SECONDS = 10.0
_FIRST_WAIT_SECONDS = 0.5
_MAX_ATTEMPTS = 5
"""Maximum number of times that a server may be lost with the same request, or while loading the same weights."""
_PREFIX = "rlhf-"


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of the weights in files."""

    label: str
    folder: Path


class RemoteServer:
    """A server that samples with the weights of `update`. All methods run on one event loop.

    Weights have labels, which the server returns with each answer. An answer of other weights is sampled again, after
    the server has the current ones: it was restarted, and has those it was started with.
    """

    def __init__(self, url: str, config: HttpEngineConfig, protocol: ServerProtocol, key: str | None) -> None:
        self.url = url
        self._protocol = protocol
        self._patience_seconds = config.patience_seconds
        self._run = uuid.uuid4().hex[:8]
        self._num_updates = 0
        self._weights: Weights | None = None
        self._labels: set[str] = set()
        """Labels of this run."""
        self._change = asyncio.Lock()
        """Held while weights are loaded, or a lost server is waited for."""
        self._ready = asyncio.Event()
        self._num_changes = 0
        self._answers = _client(url, key, config.max_batch_size, config.answer_timeout_seconds, 0.0)
        self._control = _client(url, key, 4, config.load_timeout_seconds, config.patience_seconds)
        self._calls = Calls(self._control)

    async def start(self) -> int | None:
        """Wait until the server is reachable. Returns its maximum sequence length.

        Raises `EngineLostError` after `patience_seconds`, or `ConfigError` if it lacks an endpoint.
        """
        await self._current_label()
        try:
            return await self._protocol.context_tokens(self._calls)
        except RemoteError as error:
            raise self._explained(error) from None

    def next_label(self) -> str:
        """Label of the next version."""
        self._num_updates += 1
        return f"{_PREFIX}{self._run}-{self._num_updates}"

    async def update(self, weights: Weights) -> None:
        """Load new weights. Open requests wait meanwhile and continue with them.

        Raises `SyncError` if the server rejects them, or `EngineLostError`.
        """
        async with self._change:
            self._ready.clear()
            self._weights = weights
            self._labels.add(weights.label)
            await self._load(weights)
            self._num_changes += 1
            self._ready.set()

    async def check_logprobs(self, prompt_ids: Sequence[int]) -> None:
        """Raise `ConfigError` if the server's log-probs are not those of the sampled distribution."""
        try:
            problem = await self._protocol.problem_with_logprobs(self._calls, prompt_ids)
        except RemoteError as error:
            raise self._explained(error) from None
        if problem is not None:
            raise ConfigError(f"{self.url}: {problem}", where=WHERE, hint=self._protocol.setup_hint)

    async def answer(self, job: GenerationJob, eos_ids: Sequence[int]) -> ServerAnswer:
        """Return an answer that was sampled with the weights of `update`.

        Raises `EngineLostError` if the server stays lost, `SyncError` if another run changes its weights, or
        `RlhfError` if it rejects the request.
        """
        body = json.dumps(self._protocol.request(job, eos_ids)).encode()
        seen, reason = 0, ""
        for attempt in range(_MAX_ATTEMPTS):
            if attempt > 0:
                await self._restore(seen, reason, wait_seconds=_FIRST_WAIT_SECONDS * 4 ** (attempt - 1))
            await self._ready.wait()
            seen = self._num_changes
            try:
                response = await self._answers.post(lambda: body, self._protocol.generate_path)
            except RemoteError as error:
                if not error.is_lost:
                    raise self._explained(error) from None
                reason = str(error)
            else:
                answer = self._protocol.answer(response, job)
                if answer.finish_reason is not None and self._labels.issuperset(answer.labels):
                    return answer
                reason = f"{self.url} aborted the answer, or sampled it with other weights"
        raise EngineLostError(
            f"{self.url} was lost {_MAX_ATTEMPTS} times with sample {job.sample_id}: {reason}",
            where=WHERE,
            hint="see the server's log. Continue with --resume auto",
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._answers.aclose()
        await self._control.aclose()

    async def _restore(self, seen: int, reason: str, *, wait_seconds: float) -> None:
        """Wait until the server is reachable and has the current weights. Once for all requests that noticed.

        `wait_seconds`: for a server that was not restarted. It may respond for a while after its engine has died.
        """
        async with self._change:
            if self._num_changes != seen or self._weights is None:
                return
            self._ready.clear()
            logger.warning("%s. Trying again", reason)
            label = await self._current_label()
            if label != self._weights.label:
                logger.warning(
                    "%s was restarted and has the weights %r: it gets the current ones again", self.url, label
                )
                await self._load(self._weights)
            else:
                await asyncio.sleep(min(wait_seconds, self._patience_seconds))
            self._num_changes += 1
            self._ready.set()

    async def _load(self, weights: Weights) -> None:
        started = time.monotonic()
        reason = ""
        for _ in range(_MAX_ATTEMPTS):
            try:
                await self._protocol.load(self._calls, weights.folder, weights.label)
            except RemoteError as error:
                if not error.is_lost:
                    raise SyncError(
                        f"the server did not take the new weights: {error}",
                        where=WHERE,
                        hint=f"can it read {weights.folder}? If not, see engine.weights_folder",
                    ) from None
                reason = str(error)
                logger.warning("%s, while the server loaded weights. Trying again", reason)
                await self._current_label()
            else:
                logger.info("%s loaded %s in %.2f s", self.url, weights.label, time.monotonic() - started)
                return
        raise EngineLostError(
            f"{self.url} was lost {_MAX_ATTEMPTS} times while it loaded new weights: {reason}",
            where=WHERE,
            hint=f"see the server's log. Can it read {weights.folder}? If not, see engine.weights_folder",
        )

    async def _current_label(self) -> str:
        """Label of the server's weights, once it is reachable.

        Raises `EngineLostError` after `patience_seconds`, and `SyncError` if another run changed its weights.
        """
        try:
            try:
                label = await self._protocol.label(self._calls, patience_seconds=0.0)
            except RemoteError as error:
                if not error.is_lost:
                    raise
                logger.warning("%s. Waiting at most %g s for the server", error, self._patience_seconds)
                label = await self._protocol.label(self._calls, patience_seconds=None)
        except RemoteError as error:
            raise self._explained(error) from None
        if self._weights is not None and label.startswith(_PREFIX) and label not in self._labels:
            raise SyncError(
                f"another run changed the weights of {self.url}",
                where=WHERE,
                hint="use one server for each run, and for each process that samples",
            )
        return label

    def _explained(self, error: RemoteError) -> RlhfError:
        """Error for the user, with the address and what to do."""
        if error.is_lost:
            return EngineLostError(
                f"the server is unreachable: {error}",
                where=WHERE,
                hint="check engine.url and that the server runs, or raise engine.patience_seconds. "
                "Continue with --resume auto",
            )
        if error.status == 401:
            hint = "name the environment variable with the server's key in engine.api_key_env"
            return ConfigError(str(error), where=WHERE, hint=hint)
        return ConfigError(f"the server rejected a request: {error}", where=WHERE, hint=self._protocol.setup_hint)


def _client(url: str, key: str | None, max_connections: int, seconds: float, patience_seconds: float) -> JsonClient:
    options = ClientOptions(
        max_connections=max_connections,
        connect_seconds=_CONNECT_SECONDS,
        answer_seconds=seconds,
        patience_seconds=patience_seconds,
    )
    return JsonClient(
        url,
        options,
        key=key,
        max_response_bytes=_MAX_RESPONSE_BYTES,
        again=_UNAVAILABLE,
        first_wait_seconds=_FIRST_WAIT_SECONDS,
    )
