"""Version 1 of the protocol between a run and a scorer: the messages as pydantic models, and their encoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_core.types import FinishReason, Rollout, ToolCall, Turn

VERSION: Literal[1] = 1
SCORE_PATH = f"/v{VERSION}/score"
HEALTH_PATH = f"/v{VERSION}/health"
CONTENT_TYPE = "application/json"

_MAX_ERROR_CHARS = 500

ModelT = TypeVar("ModelT", bound=BaseModel)


class _RequestPart(BaseModel):
    """Part of a request. Fields without a default are required, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


class SampleToolCall(_RequestPart):
    """A tool call of a turn: a `ToolCall`."""

    name: str
    arguments: dict[str, Any] = {}
    error: str | None = None


class SampleTurn(_RequestPart):
    """A turn of a sample: a `Turn`."""

    role: Literal["policy", "environment"]
    text: str
    token_ids: list[int]
    logprobs: list[float] = []
    reward: float = 0.0
    tool_calls: list[SampleToolCall] = []

    def turn(self) -> Turn:
        """Convert to a `Turn`."""
        return Turn(
            role=self.role,
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            reward=self.reward,
            tool_calls=tuple(ToolCall(**call.model_dump()) for call in self.tool_calls),
        )


class Sample(_RequestPart):
    """A sample in a request: a `Rollout`."""

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
    turns: list[SampleTurn] = []

    def rollout(self) -> Rollout:
        """Convert to a `Rollout`."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) and name != "answer" else value for name, value in self
        }
        return Rollout(**{**values, "turns": tuple(each.turn() for each in self.turns)})


class Request(BaseModel):
    """A request for scores."""

    protocol: Literal[1]
    samples: list[Sample]


class Response(BaseModel):
    """A response with scores. Core checks whether each score is a number."""

    protocol: Literal[1]
    scores: list[Any]


class ErrorResponse(BaseModel):
    """The body of a response whose status is not 200."""

    protocol: Literal[1]
    error: str


class Health(BaseModel):
    """The response to a request for the server's health."""

    protocol: Literal[1]
    status: Literal["ok"]
    in_flight: int


class ProtocolError(ValueError):
    """A request or response is malformed. The message gives the reason."""


def encode_request(rollouts: Sequence[Rollout]) -> bytes:
    """Encode a request. Raises `ProtocolError`, naming the sample, if its answer or metadata cannot be JSON.

    Values that a pydantic model would convert in silence, such as a set or NaN, are refused.
    """
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
    return [sample.rollout() for sample in _read(Request, body).samples]


def encode_response(scores: Sequence[float | None]) -> bytes:
    """Encode scores. None is a missing score, which the run treats as a failure of the reward.

    Example:
        >>> encode_response([0.5, None])
        b'{"protocol": 1, "scores": [0.5, null]}'
    """
    return _encode(Response(protocol=VERSION, scores=list(scores)))


def encode_error(message: str) -> bytes:
    """Encode an `ErrorResponse`. A long message is cut."""
    return _encode(ErrorResponse(protocol=VERSION, error=message[:_MAX_ERROR_CHARS]))


def encode_health(num_in_flight: int) -> bytes:
    """Encode the `Health` of a server that processes `num_in_flight` requests."""
    return _encode(Health(protocol=VERSION, status="ok", in_flight=num_in_flight))


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


def _encode(message: BaseModel) -> bytes:
    return json.dumps(message.model_dump(), allow_nan=False).encode("ascii")


def _read(model: type[ModelT], body: bytes) -> ModelT:
    try:
        return model.model_validate(json.loads(body))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ProtocolError(": ".join([".".join(map(str, problem["loc"])) or model.__name__, problem["msg"]])) from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
