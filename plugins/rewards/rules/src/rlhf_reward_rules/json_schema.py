"""`json-schema`: whether the answer is JSON that matches a schema."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_core.protocols import Reward

from .config import JsonSchemaConfig
from .processor_time import TimeUp, run_within

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


_SECONDS_PER_ANSWER = 1.0
"""Limit on processor time for checking one answer. Normal checks take milliseconds."""
_log = logging.getLogger("rlhf.rewards")


def json_schema(
    rollouts: Sequence[Any],
    *,
    inline_schema: Mapping[str, Any] | None = None,
    metadata_key: str | None = None,
    allow_fence: bool = False,
    valid_json_score: float = 0.0,
) -> list[float]:
    """1 if the completion is JSON that matches the schema, `valid_json_score` for other JSON, else 0.

    NaN and Infinity are not JSON. Schemas are interpreted by the jsonschema library. Remote references are not fetched.

    An answer that cannot be checked scores 0, because its numbers are too large, it is nested too deeply, or the check
    takes more than a second of processor time (a backtracking pattern, thousands of objects under `uniqueItems`). This
    time limit works in the reward's separate process. With `isolate: false`, only the deadline of the call applies.

    Args:
        rollouts: samples to score.
        inline_schema: schema of samples without their own schema. None accepts all JSON.
        metadata_key: metadata key of a sample's own schema.
        allow_fence: read the JSON from the last fenced code block if there is one.
        valid_json_score: score of JSON that does not match the schema.

    Raises:
        ValueError: if a sample's schema is invalid.
    """
    validators: dict[str, Any] = {}
    scores = []
    slow = []
    for rollout in rollouts:
        schema = rollout.metadata.get(metadata_key) if metadata_key is not None else None
        schema = inline_schema if schema is None else schema
        validator = None if schema is None else _validator(schema, validators, rollout.sample_id)
        check = partial(_matches_schema, rollout.completion, validator, allow_fence)
        try:
            scores.append(1.0 if run_within(_SECONDS_PER_ANSWER, check) else valid_json_score)
        except (ValueError, RecursionError, OverflowError):
            scores.append(0.0)
        except TimeUp:
            scores.append(0.0)
            slow.append(rollout.sample_id)
    if slow:
        _log.warning(
            "json-schema: sample %s scores 0: its answer takes more than %g s to check against the schema (%d of %d "
            "answers). Simpler patterns, less nesting and no uniqueItems make a schema faster",
            *(slow[0], _SECONDS_PER_ANSWER, len(slow), len(rollouts)),
        )
    return scores


def _matches_schema(completion: str, validator: Any | None, allow_fence: bool) -> bool:
    """Whether it is JSON that matches. Raises `ValueError`, `RecursionError` or `OverflowError` if that is unknown."""
    fenced = _FENCED.findall(completion) if allow_fence else []
    text = str(fenced[-1]) if fenced else completion
    value = json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
    return validator is None or bool(validator.is_valid(value))


def _parse_finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large, or not JSON")
    return number


def _validator(schema: Mapping[str, Any], known: dict[str, Any], sample_id: int) -> Any:
    from .schema_check import make_validator

    key = json.dumps(schema, sort_keys=True)
    if key not in known:
        try:
            known[key] = make_validator(schema)
        except ValueError as error:
            raise ValueError(f"sample {sample_id}: {error}") from error
    return known[key]


def build(config: JsonSchemaConfig, context: object) -> Reward:
    """Return the reward with its options."""
    return partial(
        json_schema,
        inline_schema=config.read_schema(),
        metadata_key=config.metadata_key,
        allow_fence=config.allow_fence,
        valid_json_score=config.valid_json_score,
    )
