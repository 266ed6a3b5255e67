"""Sampling and scoring on a rank, with the engine on the slot's model or on a second copy of a sharded one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from rlhf_core.components import EngineContext
from rlhf_core.models import model_kind_for
from rlhf_core.place import LocalPlace
from rlhf_core.protocols import InFlightEngine, RolloutEngine, SamplingRequest
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_forward import ScoredRow, score_rows, vocabulary_size

from .adapters import Adapter, Slot
from .options import WorkerOptions, model_config, plugin_of
from .wire import Sampled


@dataclass(frozen=True, slots=True)
class SampleWork:
    """One sample to make."""

    key: int
    """Seed of the request. Samples of a request differ in `index`."""
    index: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams


class Sampler:
    """The engine of a rank."""

    def __init__(self, slot: Slot, options: WorkerOptions, tokenizer: Any, dtype: torch.dtype) -> None:
        """Build the engine. A strategy that shards or owns parameters gets a second copy of the model.

        Args:
            slot: the adapter of the prepared model.
            options: options of all ranks.
            tokenizer: the model's tokenizer.
            dtype: dtype of the model's parameters.
        """
        self._slot, self._strategy = slot, slot.strategy
        strategy = slot.strategy
        self._is_shared = not (strategy.shards_parameters or options.is_owning)
        if self._is_shared:
            self.model: nn.Module = strategy.unwrap(slot.trained.model)
        else:
            kind = model_kind_for(model_config(options), "causal-lm")
            model = kind.load_policy(dtype=dtype, seed=options.seed, tokenizer=tokenizer)
            place = strategy if options.is_owning else LocalPlace.like(strategy)  # the former casts it
            self.model = place.prepare_inference(model)
        selected, config = plugin_of("engines", "engine", options.engine, options.engine_options)
        context = EngineContext(
            self.model,
            tokenizer,
            strategy.device,
            options.seed,
            model_path=options.base,
            compute_dtype=strategy.compute_dtype,
            in_flight=selected.component.in_flight,
        )
        self._engine = cast(RolloutEngine, selected.build(config, context))
        self._in_flight = selected.component.in_flight
        self._version = 0
        self.context_tokens = self._engine.context_tokens

    def sample(self, adapter: Adapter | None, works: Sequence[SampleWork]) -> list[Sampled]:
        """Return one sample per work, in their order. Ranks share the work. Collective."""
        strategy = self._strategy
        mine = range(len(works))[strategy.rank :: strategy.world_size]
        with self._weights(adapter):
            done = dict(zip(mine, self._complete([works[i] for i in mine]), strict=True))
        merged = {index: each for part in strategy.all_gather_objects(done) for index, each in part.items()}
        return [merged[index] for index in range(len(works))]

    def _complete(self, works: Sequence[SampleWork]) -> list[Sampled]:
        requests = [
            GenerationRequest(
                sample_id=work.key, branch=work.index, prompt_ids=work.prompt_ids, max_new_tokens=work.max_tokens
            )
            for work in works
        ]
        found: dict[tuple[int, int], Completion] = {}
        pairs = list(zip(requests, (work.sampling for work in works), strict=True))
        for completion in self._completions(pairs):
            found[completion.sample_id, completion.branch] = completion
        completions = [found[work.key, work.index] for work in works]
        return [Sampled(each.token_ids, each.logprobs, each.finish_reason == "stop") for each in completions]

    def _completions(self, pairs: Sequence[SamplingRequest]) -> Iterator[Completion]:
        if self._in_flight:
            waiting = [list(pairs)]
            yield from cast(InFlightEngine, self._engine).generate_in_flight(lambda: waiting.pop() if waiting else ())
            return
        by_sampling: dict[SamplingParams, list[GenerationRequest]] = {}
        for request, sampling in pairs:
            by_sampling.setdefault(sampling, []).append(request)
        for sampling, requests in by_sampling.items():
            yield from self._engine.generate(requests, sampling)

    def score(
        self, adapter: Adapter | None, rows: Sequence[Sequence[int]], num_top: int
    ) -> list[tuple[list[float], list[dict[int, float]]]]:
        """Return for each row the log-probs of its tokens after the first, and the most likely tokens. Collective."""
        strategy = self._strategy
        mine = range(len(rows))[strategy.rank :: strategy.world_size]
        with self._weights(adapter), strategy.autocast():
            scored = score_rows(self.model, [ScoredRow(tuple(rows[i]), 1) for i in mine], num_top)
        done = {
            index: (
                [score.logprob for score in scores],
                [dict(zip(score.top_ids, score.top_logprobs, strict=True)) for score in scores],
            )
            for index, scores in zip(mine, scored, strict=True)
        }
        merged = {index: each for part in strategy.all_gather_objects(done) for index, each in part.items()}
        return [merged[index] for index in range(len(rows))]

    @contextmanager
    def _weights(self, adapter: Adapter | None) -> Iterator[None]:
        """Context in which the model has the adapter's weights."""
        if self._is_shared:
            self._slot.hold(adapter)
        else:
            self._slot.copy_to(adapter, self.model)
        self._version += 1
        self._engine.weights_updated(self._version)
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids of the model."""
        return vocabulary_size(self.model)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
