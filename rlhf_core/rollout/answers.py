"""Calls to an engine, checked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ..columns import ENGINE_COLUMNS, Columns
from ..errors import PluginError, RlhfError
from ..protocols import RolloutEngine
from ..types import Completion, GenerationRequest, PhaseTimes, SamplingParams

AskerT = TypeVar("AskerT")


def answers(
    engine: RolloutEngine,
    asked: Sequence[tuple[GenerationRequest, AskerT]],
    sampling: SamplingParams,
    times: PhaseTimes,
) -> Iterator[tuple[AskerT, Completion]]:
    """Yield each completion with the value that came with its request, as soon as it is done. Adds to `times`.

    Raises `RlhfError` if the engine does not answer each request once.
    """
    requests = [_with_options(request, sampling, engine) for request, _ in asked]
    waiting = {(request.sample_id, request.branch): (request, asker) for request, asker in asked}
    started = time.perf_counter()
    for completion in engine.generate(requests, sampling):
        place = completion.sample_id, completion.branch
        if place not in waiting:
            raise _engine_error(f"answered branch {place[1]} of sample {place[0]}, which is not or no longer asked for")
        request, asker = waiting.pop(place)
        times.response_tokens += len(completion.token_ids)
        times.prompt_tokens += len(request.prompt_ids)
        times.reused_tokens += completion.num_reused
        yield asker, with_kinds(completion, engine)
    if waiting:
        raise _engine_error(f"left {len(waiting)} of {len(asked)} requests without an answer")
    times.rollout_s += time.perf_counter() - started


def _with_options(request: GenerationRequest, sampling: SamplingParams, engine: RolloutEngine) -> GenerationRequest:
    """The request with the options of `sampling` that it does not set itself.

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
    """The completion with its columns as `Columns`.

    Raises `PluginError` for a column that the engine does not declare, or one that does not fit the tokens.
    """
    if not completion.columns:
        return completion
    columns = Columns(completion.columns, {**getattr(engine, "columns", {}), **ENGINE_COLUMNS})
    for name, value in columns.items():
        if columns.kinds[name].per == "token" and len(value) != len(completion.token_ids):
            problem = f"{type(engine).__name__} gave {len(value)} values for {len(completion.token_ids)} tokens"
            raise PluginError(problem, where=f"column {name!r}", hint="report this to the authors of the engine")
    return replace(completion, columns=columns)


def _engine_error(what: str) -> RlhfError:
    return RlhfError(f"the engine {what}", where="rollout", hint="report this to the authors of the engine plugin")
