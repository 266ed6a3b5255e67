"""Version 1 of the protocol between a run and a scorer: what stands in a request and in its response."""

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
    """What a request says of a sample: a `Rollout`. What has no default is required, what is unknown is left out."""

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
        """Raises `TypeError`, `KeyError` or `ValueError` for turns that are none."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) and name != "answer" else value for name, value in self
        }
        return Rollout(**{**values, "turns": tuple(map(Turn.from_mapping, self.turns))})


class Request(BaseModel):
    """A request."""

    protocol: Literal[1]
    samples: list[Sample]


class Response(BaseModel):
    """A response; whether each score is a number is for core to judge."""

    protocol: Literal[1]
    scores: list[Any]


class ProtocolError(ValueError):
    """A request or response that is none; the text says why."""


def encode_request(rollouts: Sequence[Rollout]) -> bytes:
    """Raises `ProtocolError` naming a sample whose answer or metadata JSON cannot hold."""
    return b'{"protocol":%d,"samples":[%s]}' % (VERSION, b",".join(map(_encode_sample, rollouts)))


def _encode_sample(rollout: Rollout) -> bytes:
    sample = {name: getattr(rollout, name) for name in Sample.model_fields}
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
    samples = _read(Request, body).samples
    try:
        return [sample.rollout() for sample in samples]
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"samples: turns is no list of turns: {error!r}") from None


def encode_response(scores: Sequence[float | None]) -> bytes:
    """None stands for a sample that has no score; the run that asked treats it as a failure of the reward."""
    return json.dumps({"protocol": VERSION, "scores": list(scores)}, allow_nan=False).encode("ascii")


def encode_error(message: str) -> bytes:
    """The body of every response that is not 200."""
    return json.dumps({"protocol": VERSION, "error": message}).encode("ascii")


def decode_response(body: bytes, count: int) -> list[Any]:
    """The scores, `count` of them. Raises `ProtocolError`."""
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
