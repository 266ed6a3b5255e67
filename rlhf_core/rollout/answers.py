"""Calls to an engine, with checks of its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ..columns import ENGINE_COLUMNS, Columns
from ..errors import PluginError, RlhfError
from ..protocols import RolloutEngine
from ..types import Completion, GenerationRequest, PhaseTimes, SamplingParams

ContextT = TypeVar("ContextT")


def answers(
    engine: RolloutEngine,
    pairs: Sequence[tuple[GenerationRequest, ContextT]],
    sampling: SamplingParams,
    times: PhaseTimes,
) -> Iterator[tuple[ContextT, Completion]]:
    """Yield each completion, as soon as it is finished, with the value paired with its request. Adds to `times`.

    Raises `RlhfError` if the engine does not answer each request once.
    """
    requests = [_with_options(request, sampling, engine) for request, _ in pairs]
    waiting = {(request.sample_id, request.branch): (request, context) for request, context in pairs}
    started = time.perf_counter()
    for completion in engine.generate(requests, sampling):
        key = completion.sample_id, completion.branch
        if key not in waiting:
            raise _engine_error(f"answered branch {key[1]} of sample {key[0]}, which is not or no longer requested")
        request, context = waiting.pop(key)
        times.response_tokens += len(completion.token_ids)
        times.prompt_tokens += len(request.prompt_ids)
        times.reused_tokens += completion.num_reused
        yield context, with_kinds(completion, engine)
    if waiting:
        raise _engine_error(f"left {len(waiting)} of {len(pairs)} requests unanswered")
    times.rollout_s += time.perf_counter() - started


def _with_options(request: GenerationRequest, sampling: SamplingParams, engine: RolloutEngine) -> GenerationRequest:
    """Return the request with the options of `sampling` that it does not set itself.

    Raises `PluginError` for an option that the engine does not accept.
    """
    options = {**sampling.options, **request.options}
    accepted = getattr(engine, "request_options", {})
    for name in options.keys() - accepted.keys():
        problem = f"a request sets the option {name!r}, which {type(engine).__name__} does not accept"
        raise PluginError(
            problem, where=f"sample {request.sample_id}", hint=f"it accepts {', '.join(accepted) or 'none'}"
        )
    return replace(request, options=options) if sampling.options else request


def with_kinds(completion: Completion, engine: RolloutEngine) -> Completion:
    """Return the completion with its columns as `Columns`.

    Raises `PluginError` for a column that the engine does not declare, or whose length differs from the tokens.
    """
    if not completion.columns:
        return completion
    columns = Columns(completion.columns, {**getattr(engine, "columns", {}), **ENGINE_COLUMNS})
    for name, value in columns.items():
        if columns.kinds[name].per == "token" and len(value) != len(completion.token_ids):
            problem = f"{type(engine).__name__} returned {len(value)} values for {len(completion.token_ids)} tokens"
            raise PluginError(problem, where=f"column {name!r}", hint="report this to the authors of the engine")
    return replace(completion, columns=columns)


def _engine_error(problem: str) -> RlhfError:
    return RlhfError(f"the engine {problem}", where="rollout", hint="report this to the authors of the engine plugin")
