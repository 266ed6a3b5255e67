"""Version 1 of the protocol between a run and a scorer: the contents of requests and responses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_core.types import FinishReason, Rollout, Turn

VERSION = 1
SCORE_PATH = f"/v{VERSION}/score"
HEALTH_PATH = f"/v{VERSION}/health"
CONTENT_TYPE = "application/json"

ModelT = TypeVar("ModelT", bound=BaseModel)


class Sample(BaseModel):
    """A sample in a request: a `Rollout`. Fields without a default are required, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

    sample_id: int
    prompt: str
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] = []
    completion: str
    completion_ids: list[int] = []
    logprobs: list[float] = []
    answer: Any = None
    metadata: dict[str, Any] = {}
    policy_version: int = 0
    policy_versions: list[int] = []
    finish_reason: FinishReason = "stop"
    action_mask: list[bool] | None = None
    group_id: int = 0
    branch: int = 0
    turns: list[dict[str, Any]] = []

    def rollout(self) -> Rollout:
        """Convert to a `Rollout`. Raises `TypeError`, `KeyError` or `ValueError` if the turns are malformed."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) and name != "answer" else value for name, value in self
        }
        return Rollout(**{**values, "turns": tuple(map(Turn.from_mapping, self.turns))})


class Request(BaseModel):
    """A request for scores."""

    protocol: Literal[1]
    samples: list[Sample]


class Response(BaseModel):
    """A response with scores. Core checks whether each score is a number."""

    protocol: Literal[1]
    scores: list[Any]


class ProtocolError(ValueError):
    """A request or response is malformed. The message gives the reason."""


def encode_request(rollouts: Sequence[Rollout]) -> bytes:
    """Encode a request. Raises `ProtocolError`, naming the sample, if its answer or metadata cannot be JSON."""
    return b'{"protocol":%d,"samples":[%s]}' % (VERSION, b",".join(map(_encode_sample, rollouts)))


def _encode_sample(rollout: Rollout) -> bytes:
    sample = {name: getattr(rollout, name) for name in Sample.model_fields}
    try:
        return json.dumps(sample, separators=(",", ":"), allow_nan=False, default=_to_json).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"sample {rollout.sample_id} cannot be sent as JSON: {error}") from None


def _to_json(value: Any) -> Any:
    if isinstance(value, Turn):
        return value.to_mapping()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it cannot contain a {type(value).__name__}")


def decode_request(body: bytes) -> list[Rollout]:
    """Return the samples of a request. Raises `ProtocolError`."""
    samples = _read(Request, body).samples
    try:
        return [sample.rollout() for sample in samples]
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"samples: turns is not a list of turns: {error!r}") from None


def encode_response(scores: Sequence[float | None]) -> bytes:
    """Encode scores. None is a missing score, which the run treats as a failure of the reward.

    Example:
        >>> encode_response([0.5, None])
        b'{"protocol": 1, "scores": [0.5, null]}'
    """
    return json.dumps({"protocol": VERSION, "scores": list(scores)}, allow_nan=False).encode("ascii")


def encode_error(message: str) -> bytes:
    """Encode the body of a response whose status is not 200."""
    return json.dumps({"protocol": VERSION, "error": message}).encode("ascii")


def decode_response(body: bytes, count: int) -> list[Any]:
    """Return the `count` scores of a response. Raises `ProtocolError`.

    Example:
        >>> decode_response(b'{"protocol": 1, "scores": [0.5, null]}', count=2)
        [0.5, None]
    """
    scores = _read(Response, body).scores
    if len(scores) != count:
        raise ProtocolError(f"{len(scores)} scores for {count} samples")
    return scores


def _read(model: type[ModelT], body: bytes) -> ModelT:
    try:
        return model.model_validate(json.loads(body))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ProtocolError(": ".join([".".join(map(str, problem["loc"])) or model.__name__, problem["msg"]])) from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
