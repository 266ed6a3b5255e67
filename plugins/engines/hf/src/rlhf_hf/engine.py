"""The engine `hf`: samples from any transformers causal LM, each answer independent of its batch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from rlhf_core.components import EngineContext
from rlhf_core.errors import ConfigError, OutOfMemoryError
from rlhf_core.protocols import InFlightEngine, SamplingRequest
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_forward import BannedWords, Vocabulary, structure_of, vocabulary_of
from rlhf_models import PromptInputs, check_same_weights, eos_token_ids

from .cache import round_down, round_up
from .config import HfEngineConfig
from .forward import ModelForward, generating
from .lockstep import LockstepBatch, LockstepModel, take_matching
from .paths import Path, choose_path
from .prefixes import PrefixStore
from .prepack import PackedLinears
from .rows import DecodingRow, TokenSampler
from .running_batch import RunningBatch
from .slot_model import SlotModel
from .slots import SlotBatch
from .stop import StopRule
from .structure_check import StructureCheck

logger = logging.getLogger(__name__)


class HfEngine:
    """An `InFlightEngine` on a module in this process, which it may share with the trainer."""

    def __init__(self, config: HfEngineConfig, context: EngineContext) -> None:
        self._config = config
        self._tokenizer = context.tokenizer
        self._seed = context.seed
        self._structure_check = StructureCheck()
        self._module = context.model
        self._forward = ModelForward(context.model)
        self.context_tokens = self._forward.context_tokens
        """Maximum sequence length, from the model's positions."""
        self.eos_token_ids = eos_token_ids(self._forward.base, context.tokenizer)
        words = config.banned_words
        self._banned = BannedWords(words, context.tokenizer, self.eos_token_ids) if words else None
        self._path: Path | None = None
        self._packed: PackedLinears | None = None
        self._dtype = _mixed_dtype(config, context, self._forward.dtype)
        """Type of matrix multiplications, None for the type of the weights."""
        self.policy_version = 0
        self._prefixes = PrefixStore(config.prefix_cache_tokens)
        self._running: RunningBatch | None = None

    @property
    def path(self) -> Path:
        """Generation path of this model, determined by a short trial at first use."""
        if self._path is None:
            with generating(self._module):
                self._path = choose_path(self._forward)
            if self._path.name != "slots":
                logger.warning(
                    "engine hf generates on the slower path '%s' (%s)", self._path.name, ", ".join(self._path.reasons)
                )
        return self._path

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Check all requests, then yield completions as they finish (see `RolloutEngine.generate`).

        Raises `DataError` if a prompt leaves no room for an answer, and `ConfigError` if the cache bound is too small
        for one sequence. Iterating raises `OutOfMemoryError`, `DivergenceError`, and `SyncError` if the weights change
        before the last completion is taken.
        """
        running, version = self.begin(requests, sampling), self.policy_version

        def unchanged() -> Sequence[SamplingRequest]:
            check_same_weights(version, self.policy_version, where="engine hf")
            return ()

        return self._completions(running, unchanged)

    def begin(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> RunningBatch:
        """Start the rows of one `generate` call, which other rows cannot join. Raises the same errors."""
        running = RunningBatch(self._sampler, self._batch, self.context_tokens)
        running.set_weights_version(self.policy_version)
        running.add([(request, sampling) for request in requests])
        if running.is_busy:
            running.begin()
        return running

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Answer the requests that `between` returns. It is called before each step (see `InFlightEngine`).

        Raises the errors of `generate` while iterating.
        """
        batch = partial(self._batch, in_flight=True)
        self._running = RunningBatch(self._sampler, batch, self.context_tokens)
        return self._completions(self._running, between, in_flight=True)

    def cancel(self, sample_id: int, branch: int = 0) -> None:
        """Drop an open request of `generate_in_flight`. Called inside `between` (see `CancelingEngine`)."""
        if self._running is not None:
            # Otherwise the row's keys and values, of the old weights, would be kept for the new ones.
            self._running.set_weights_version(self.policy_version)
            self._running.cancel(sample_id, branch)

    def _sampler(self, sampling: SamplingParams) -> TokenSampler:
        stop = StopRule(self.eos_token_ids, sampling.stop, self._tokenizer)
        return TokenSampler(self._seed, sampling, stop, self._banned, self._vocabulary)

    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self._tokenizer, self.eos_token_ids)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check options of a client's request before it is made. May be called on any thread.

        Raises `DataError` if the structure is invalid, and `ConfigError` if structures do not work here.
        """
        where = "engine hf"
        if (structure := structure_of(options, where=where)) is not None:
            vocabulary = self._vocabulary()
            if not vocabulary.is_compiled(structure):
                self._structure_check.check(structure, vocabulary.size)
            vocabulary.answer(structure, where=where)

    def _batch(self, rows: deque[DecodingRow], *, in_flight: bool = False) -> SlotBatch | LockstepBatch:
        """Create a batch for the waiting `rows`. `in_flight`: other rows may join later."""
        config = self._config
        longest = max(len(row.prompt_ids) + row.limit for row in rows)
        max_rows = config.max_batch_size if in_flight else min(config.max_batch_size, len(rows))
        num_slots = min(max_rows, config.max_cache_tokens // round_up(longest))
        if num_slots < 1:
            raise ConfigError(
                f"max_cache_tokens {config.max_cache_tokens} cannot hold one sequence of {longest} tokens",
                where="engine hf",
                hint=f"raise engine.max_cache_tokens to {round_up(longest)} or lower engine.max_new_tokens",
            )
        name = self._path_of(rows)
        if name == "slots":
            # Waiting prompts are prefilled ahead, many per call, if the cache limit has room for them.
            num_ahead = min(num_slots // 2, config.max_cache_tokens // round_up(longest) - num_slots)
            token_limit = round_down(config.max_cache_tokens // (num_slots + num_ahead))
            model = SlotModel(self._forward, num_slots, longest, token_limit)
            return SlotBatch(model, config.prefill_batch_tokens, self._prefixes, max(1, num_ahead))
        matching = take_matching(rows, num_slots, same_length=name != "padded")
        return LockstepBatch(LockstepModel(self._forward, name), matching)

    def _path_of(self, rows: Sequence[DecodingRow]) -> Literal["slots", "padded", "equal", "recompute"]:
        """Path of a batch that starts with these waiting rows."""
        kind = self._forward.kind
        has_inputs = any(row.request.inputs for row in rows)
        if isinstance(kind, PromptInputs):
            is_cached = has_inputs and self.path.name != "recompute"
            return "equal" if is_cached else self.path.name
        # Other model inputs may belong to any token, so full sequences are computed without a cache.
        return "recompute" if has_inputs or kind.inputs_differ else self.path.name

    def _completions(
        self, running: RunningBatch, between: Callable[[], Sequence[SamplingRequest]], *, in_flight: bool = False
    ) -> Iterator[Completion]:
        """`in_flight`: call `between` before each step, not only after rows have finished."""
        try:
            while True:
                joining = between()
                running.set_weights_version(self.policy_version)
                running.add(joining)
                if not running.is_busy:
                    return
                # Generation mode ends before every yield, since the caller may train or disable an adapter meanwhile.
                with self._generating():
                    finished = running.step()
                    while not (in_flight or finished) and running.is_busy:
                        finished = running.step()
                for row in finished:
                    yield row.completion()
        finally:
            # A module that is trained in this process is about to change, so packed copies would only waste memory.
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
        # Autocast's cache is not needed, since the linear weights have cast copies.
        return torch.autocast(self._forward.device.type, dtype=self._dtype, cache_enabled=False)

    def weights_updated(self, version: int) -> None:
        """Drop packed copies and cached prefixes, since the module now has the weights of `version`."""
        self._packed = None
        self._prefixes.clear()
        self.policy_version = version

    def close(self) -> None:
        """Free packed weights and cached prefixes, and end the check of structures. The module stays the caller's."""
        self._structure_check.close()
        self._packed = None
        self._prefixes.clear()


def build(config: HfEngineConfig, context: EngineContext) -> InFlightEngine:
    """Build the engine `hf`."""
    return HfEngine(config, context)


def _mixed_dtype(config: HfEngineConfig, context: EngineContext, weights: torch.dtype) -> torch.dtype | None:
    """Type of matrix multiplications, None for the type of the weights."""
    if weights is not torch.float32:
        return None
    if config.precision == "auto":
        return context.compute_dtype
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
