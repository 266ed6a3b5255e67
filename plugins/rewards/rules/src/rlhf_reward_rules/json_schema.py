"""`json-schema`: the answer is JSON that fits a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.protocols import Reward

from .config import JsonSchemaConfig

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def json_schema(
    rollouts: Sequence[Any],
    *,
    inline_schema: Mapping[str, Any] | None = None,
    metadata_key: str | None = None,
    allow_fence: bool = False,
    valid_json_score: float = 0.0,
) -> list[float]:
    """1 where the completion is JSON that fits the schema, `valid_json_score` where it is other JSON, else 0.

    The schema is the sample's own (under `metadata_key` of its metadata) or `inline_schema`; without either all
    JSON fits. `allow_fence` also takes the JSON from the last fenced code block. NaN and Infinity are no JSON.
    Schemas are read by the jsonschema library; remote references are not fetched.
    """
    checkers: dict[str, Any] = {}
    scores = []
    for rollout in rollouts:
        schema = rollout.metadata.get(metadata_key) if metadata_key is not None else None
        schema = inline_schema if schema is None else schema
        try:
            value = json.loads(_json_text(rollout.completion, allow_fence), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            scores.append(0.0)
            continue
        scores.append(1.0 if schema is None or _checker(schema, checkers).is_valid(value) else valid_json_score)
    return scores


def _json_text(completion: str, allow_fence: bool) -> str:
    fenced = _FENCED.findall(completion) if allow_fence else []
    return str(fenced[-1]) if fenced else completion


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _checker(schema: Mapping[str, Any], known: dict[str, Any]) -> Any:
    import jsonschema
    from referencing import Registry

    key = json.dumps(schema, sort_keys=True)
    if key not in known:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"the schema is no JSON schema: {error.message}") from error
        known[key] = kind(schema, registry=Registry())  # an empty registry: nothing is fetched from outside
    return known[key]


def build(config: JsonSchemaConfig, context: object) -> Reward:
    """The reward with its options, for the plugin's component."""
    schema = config.inline_schema
    if config.schema_file is not None:
        schema = json.loads(Path(config.schema_file).expanduser().read_text(encoding="utf-8"))
    return partial(
        json_schema,
        inline_schema=schema,
        metadata_key=config.metadata_key,
        allow_fence=config.allow_fence,
        valid_json_score=config.valid_json_score,
    )
