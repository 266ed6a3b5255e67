"""The engine `hf`: samples from any transformers causal LM, each answer independent of its batch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from rlhf_core.components import EngineContext
from rlhf_core.errors import ConfigError, OutOfMemoryError, SyncError
from rlhf_core.protocols import InFlightEngine, SamplingRequest
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_models import eos_token_ids

from .cache import round_down, round_up
from .config import HfEngineConfig
from .flight import Flight
from .forward import ModelForward, generating
from .lockstep import LockstepBatch, LockstepModel, take_alike
from .paths import Path, choose_path
from .prefixes import PrefixStore
from .prepack import PackedLinears
from .rows import Row, Sampler
from .slot_model import SlotModel
from .slots import SlotBatch
from .stop import StopRule

logger = logging.getLogger(__name__)


class HfEngine:
    """An `InFlightEngine` over a module of this process, shared with the trainer or its own."""

    def __init__(self, config: HfEngineConfig, context: EngineContext) -> None:
        self._config = config
        self._tokenizer = context.tokenizer
        self._seed = context.seed
        self._module = context.model
        self._forward = ModelForward(context.model)
        self.context_tokens = self._forward.context_tokens
        """Longest sequence the model has positions for."""
        self.eos_token_ids = eos_token_ids(self._forward.base, context.tokenizer)
        self._path: Path | None = None
        self._packed: PackedLinears | None = None
        self._dtype = _mixed_dtype(config, context, self._forward.dtype)
        """Type of matrix multiplications; None is the weights' own type."""
        self.policy_version = 0
        self._prefixes = PrefixStore(config.prefix_cache_tokens)
        self._flight: Flight | None = None

    @property
    def path(self) -> Path:
        """How this model generates; determined by a short trial at first use."""
        if self._path is None:
            with generating(self._module):
                self._path = choose_path(self._forward)
            if self._path.name != "slots":
                logger.warning(
                    "engine hf generates on its safe, slower path '%s' (%s)",
                    self._path.name,
                    "; ".join(self._path.reasons),
                )
        return self._path

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Check all requests, then yield completions as they finish (see `RolloutEngine.generate`).

        Raises `DataError` for a prompt that leaves no room for an answer and `ConfigError` when the cache bound is
        too small for one sequence, both here; `OutOfMemoryError`, `DivergenceError` and, when the weights change
        before the last completion was taken, `SyncError` while iterating.
        """
        flight, version = self.begin(requests, sampling), self.policy_version

        def unchanged() -> Sequence[SamplingRequest]:
            if version != self.policy_version:
                raise SyncError(
                    f"weights of version {self.policy_version} arrived while version {version} was generating",
                    where="engine hf",
                    hint="take all completions of a generate call before publishing",
                )
            return ()

        return self._completions(flight, unchanged)

    def begin(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Flight:
        """The rows of one `generate` call, which no others join. Raises as that does, before the first step."""
        flight = Flight(self._sampler, self._batch, self.context_tokens)
        flight.weights_are(self.policy_version)
        flight.add([(request, sampling) for request in requests])
        if flight.busy:
            flight.begin()
        return flight

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Answer what `between` returns, which is called before each step (see `InFlightEngine`).

        Raises what `generate` raises, while iterating.
        """
        batch = partial(self._batch, goes_on=True)
        self._flight = Flight(self._sampler, batch, self.context_tokens)
        return self._completions(self._flight, between, goes_on=True)

    def cancel(self, sample_id: int, branch: int = 0) -> None:
        """Drop an open request of `generate_in_flight`; called in `between` (see `CancelingEngine`)."""
        if self._flight is not None:
            self._flight.weights_are(self.policy_version)  # else its keys and values are kept for the new weights
            self._flight.cancel(sample_id, branch)

    def _sampler(self, sampling: SamplingParams) -> Sampler:
        return Sampler(self._seed, sampling, StopRule(self.eos_token_ids, sampling.stop, self._tokenizer))

    def _batch(self, rows: deque[Row], *, goes_on: bool = False) -> SlotBatch | LockstepBatch:
        """A new one for these rows that wait. `goes_on`: others may join them."""
        config = self._config
        longest = max(len(row.prompt_ids) + row.limit for row in rows)
        most_rows = config.max_batch_size if goes_on else min(config.max_batch_size, len(rows))
        num_slots = min(most_rows, config.max_cache_tokens // round_up(longest))
        if num_slots < 1:
            raise ConfigError(
                f"max_cache_tokens {config.max_cache_tokens} cannot hold one sequence of {longest} tokens",
                where="engine hf",
                hint=f"raise engine.max_cache_tokens to {round_up(longest)} or lower engine.max_new_tokens",
            )
        # Inputs of the model may belong to any token: whole sequences are computed, without a cache.
        recomputes = self._forward.kind.inputs_differ or any(row.request.inputs for row in rows)
        name = "recompute" if recomputes else self.path.name
        if name == "slots":
            # Waiting prompts are prefilled ahead, many in one call, where the cache limit has room for them.
            num_ahead = min(num_slots // 2, config.max_cache_tokens // round_up(longest) - num_slots)
            most_tokens = round_down(config.max_cache_tokens // (num_slots + num_ahead))
            model = SlotModel(self._forward, num_slots, longest, most_tokens)
            return SlotBatch(model, config.prefill_batch_tokens, self._prefixes, max(1, num_ahead))
        alike = take_alike(rows, num_slots, same_length=name != "padded")
        return LockstepBatch(LockstepModel(self._forward, name), alike)

    def _completions(
        self, flight: Flight, between: Callable[[], Sequence[SamplingRequest]], *, goes_on: bool = False
    ) -> Iterator[Completion]:
        """`goes_on`: `between` is called before each step, not only after rows have finished."""
        try:
            while True:
                asked = between()
                flight.weights_are(self.policy_version)
                flight.add(asked)
                if not flight.busy:
                    return
                # Generation mode ends before every yield: the caller may train, or switch an adapter off, in between.
                with self._generating():
                    finished = flight.step()
                    while not (goes_on or finished) and flight.busy:
                        finished = flight.step()
                for row in finished:
                    yield row.completion()
        finally:
            # A module that is trained here is about to change: packed copies would only take its memory.
            if any(parameter.requires_grad for parameter in self._module.parameters()):
                self._packed = None

    @contextmanager
    def _generating(self) -> Iterator[None]:
        with generating(self._module):
            if self._packed is None:
                self._packed = PackedLinears(self._module, num_rows=self._config.max_batch_size, dtype=self._dtype)
            try:
                with self._packed.applied(), self._arithmetic():
                    yield
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"the device ran out of memory while generating ({error})",
                    where="engine hf",
                    hint="lower engine.max_batch_size, engine.max_cache_tokens or engine.prefill_batch_tokens",
                ) from error

    def _arithmetic(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return nullcontext()
        # No cache of casts: the linear weights have their copies.
        return torch.autocast(self._forward.device.type, dtype=self._dtype, cache_enabled=False)

    def weights_updated(self, version: int) -> None:
        """The module has the weights of `version`: forget the packed copies, and what earlier turns left."""
        self._packed = None
        self._prefixes.clear()
        self.policy_version = version

    def close(self) -> None:
        """Free the packed weights and what earlier turns left; the module belongs to the caller."""
        self._packed = None
        self._prefixes.clear()


def build(config: HfEngineConfig, context: EngineContext) -> InFlightEngine:
    """Build the engine `hf`."""
    return HfEngine(config, context)


def _mixed_dtype(config: HfEngineConfig, context: EngineContext, weights: torch.dtype) -> torch.dtype | None:
    """Type of matrix multiplications; None where it is the weights' own."""
    if weights is not torch.float32:
        return None
    if config.precision == "auto":
        return context.compute_dtype
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
