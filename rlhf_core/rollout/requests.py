"""Options of requests, which an engine has to accept, and columns of completions, which it has to declare."""

from __future__ import annotations

from dataclasses import replace

from ..columns import ENGINE_COLUMNS, Columns
from ..errors import PluginError
from ..protocols import RolloutEngine
from ..types import Completion, GenerationRequest, SamplingParams


def with_options(request: GenerationRequest, sampling: SamplingParams, engine: RolloutEngine) -> GenerationRequest:
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


def row_columns(parts: list[tuple[int, Columns]], num_tokens: int) -> Columns:
    """Columns of a response of `num_tokens`, from those of its sampled parts and the tokens before each.

    Tokens without a value have `fill`. Per sample, the value of the last part is kept.
    """
    found = Columns()
    for start, columns in parts:
        for name, value in columns.items():
            if columns.kinds[name].per == "token":
                whole = found.get(name)
                if whole is None:
                    whole = value.new_full((num_tokens, *value.shape[1:]), columns.kinds[name].fill)
                whole[start : start + len(value)] = value
                columns |= Columns({name: whole}, columns.kinds)
        found |= columns
    return found
