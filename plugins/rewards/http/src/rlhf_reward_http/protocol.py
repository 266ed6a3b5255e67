"""Version 1 of the protocol between a run and a scorer: what stands in a request and in its response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rlhf_core.types import Rollout, Turn

VERSION = 1
SCORE_PATH = f"/v{VERSION}/score"
HEALTH_PATH = f"/v{VERSION}/health"
CONTENT_TYPE = "application/json"

_DEFAULTS: Mapping[str, Any] = {
    "messages": None,
    "prompt_ids": [],
    "completion_ids": [],
    "logprobs": [],
    "answer": None,
    "metadata": {},
    "policy_version": 0,
    "policy_versions": [],
    "finish_reason": "stop",
    "action_mask": None,
    "group_id": 0,
    "branch": 0,
    "turns": [],
}
"""Defaults of optional fields of a request; the other fields are required."""
_KINDS: Mapping[str, tuple[type, ...]] = {
    "sample_id": (int,),
    "prompt": (str,),
    "messages": (list, type(None)),
    "prompt_ids": (list,),
    "completion": (str,),
    "completion_ids": (list,),
    "logprobs": (list,),
    "metadata": (dict,),
    "policy_version": (int,),
    "policy_versions": (list,),
    "finish_reason": (str,),
    "action_mask": (list, type(None)),
    "group_id": (int,),
    "branch": (int,),
    "turns": (list,),
}
_FIELDS = tuple(field.name for field in fields(Rollout))
assert set(_FIELDS) == {*_KINDS, "answer"}


class ProtocolError(ValueError):
    """A request or response that is none; the text says why."""


def encode_request(rollouts: Sequence[Rollout]) -> bytes:
    """Raises `ProtocolError` naming a sample whose answer or metadata JSON cannot hold."""
    return b'{"protocol":%d,"samples":[%s]}' % (VERSION, b",".join(map(_encode_sample, rollouts)))


def _encode_sample(rollout: Rollout) -> bytes:
    sample = {name: getattr(rollout, name) for name in _FIELDS}
    try:
        return json.dumps(sample, separators=(",", ":"), allow_nan=False, default=_plain).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"sample {rollout.sample_id} cannot be sent as JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Turn):
        return value.to_mapping()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no place in it")


def decode_request(body: bytes) -> list[Rollout]:
    """The samples of a request. Raises `ProtocolError`."""
    message = _message(body)
    samples = message.get("samples")
    if not isinstance(samples, list):
        raise ProtocolError("`samples` should be a list")
    return [_decode_sample(sample, index) for index, sample in enumerate(samples)]


def _decode_sample(sample: Any, index: int) -> Rollout:
    if not isinstance(sample, dict):
        raise ProtocolError(f"samples.{index} should be an object")
    values = {**_DEFAULTS, **{name: sample[name] for name in _FIELDS if name in sample}}
    for name, kinds in _KINDS.items():
        if name not in values:
            raise ProtocolError(f"samples.{index}.{name} is required")
        if not isinstance(values[name], kinds) or isinstance(values[name], bool):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ProtocolError(f"samples.{index}.{name} should be {wanted}")
    tuples = {name: tuple(value) for name, value in values.items() if name != "answer" and isinstance(value, list)}
    try:
        turns = tuple(map(Turn.from_mapping, values["turns"]))
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"samples.{index}.turns is no list of turns: {error!r}") from None
    return Rollout(**(values | tuples | {"turns": turns}))


def encode_response(scores: Sequence[float | None]) -> bytes:
    """None stands for a sample that has no score; the run that asked treats it as a failure of the reward."""
    return json.dumps({"protocol": VERSION, "scores": list(scores)}, allow_nan=False).encode("ascii")


def encode_error(message: str) -> bytes:
    """The body of every response that is not 200."""
    return json.dumps({"protocol": VERSION, "error": message}).encode("ascii")


def decode_response(body: bytes, count: int) -> list[Any]:
    """The scores, `count` of them; whether each is a number is for core to judge. Raises `ProtocolError`."""
    scores = _message(body).get("scores")
    if not isinstance(scores, list):
        raise ProtocolError("`scores` should be a list")
    if len(scores) != count:
        raise ProtocolError(f"{len(scores)} scores for {count} samples")
    return scores


def _message(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("should be a JSON object")
    if message.get("protocol") != VERSION:
        raise ProtocolError(f"protocol {message.get('protocol')!r}, this is {VERSION}")
    return message
