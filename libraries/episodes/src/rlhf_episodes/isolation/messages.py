"""Messages between a run and the child process of its environments: pickles to the child, validated JSON from it.

The child receives one `ImportRequest`, then for each episode a `StartEpisode` and a `TurnResult` per turn. It sends
`FromChild`.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlhf_core import errors
from rlhf_core.errors import RlhfError

from ..compaction import Compaction, ContextFull
from ..contract import Endpoint, EpisodeTruncated, Outcome, Reply, Status, Task
from ..episode import State
from ..progress import Step

MAX_MESSAGE_BYTES = 64 << 20
"""Limit on one message from the child. An observation may have a million characters, and a turn several of them."""
MAX_TEXT_CHARS = 10_000
"""Limit on the text of an error or the name of a call."""
_HEAD = struct.Struct("!I")


class BadMessage(ValueError):
    """The child sent an invalid message. The text continues a sentence about the child: `wrote a message of ...`."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ErrorMessage(_Message):
    """An `RlhfError` with the name of its class."""

    kind: str = Field(max_length=100)
    message: str
    where: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: RlhfError) -> ErrorMessage:
        """Convert an error of core, or a plugin's subclass of one."""
        kind = next(each.__name__ for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
        return cls(kind=kind, message=error.message, where=error.where, hint=error.hint)

    def error(self) -> RlhfError:
        """Return the error as an exception of core's class."""
        kind = getattr(errors, self.kind, RlhfError)
        kind = kind if isinstance(kind, type) and issubclass(kind, RlhfError) else RlhfError
        return kind(self.message, where=self.where, hint=self.hint)


class Ready(_Message):
    """The import of the environment's code has finished, with or without an error."""

    type: Literal["ready"] = "ready"
    error: ErrorMessage | None = None


class _OfEpisode(_Message):
    episode: int
    """Number of the episode (`StartEpisode.episode`)."""


class CallStarted(_OfEpisode):
    """A call of the environment started."""

    type: Literal["call-started"] = "call-started"
    call: str = Field(max_length=MAX_TEXT_CHARS)


class TurnRequest(_OfEpisode):
    """Requests a turn of the policy in one branch (`Policy.turn`)."""

    type: Literal["turn"] = "turn"
    branch: int
    """Number of the proxy in the child: 0, or `ForkRequest.new`."""
    turn: int
    """Request number, repeated in the result."""
    messages: str | list[dict[str, Any]] | None
    tools: list[dict[str, Any]]
    stop: list[str]
    options: dict[str, Any] = Field(default_factory=dict)
    compaction: Compaction = None


class EndpointRequest(_OfEpisode):
    """Requests an endpoint (`Policy.endpoint`)."""

    type: Literal["endpoint"] = "endpoint"
    turn: int
    """Request number, counted together with those of turns."""


class TurnCanceled(_OfEpisode):
    """The environment canceled a turn."""

    type: Literal["turn-canceled"] = "turn-canceled"
    turn: int


class ForkRequest(_OfEpisode):
    """Requests a new branch (`Policy.fork`)."""

    type: Literal["fork"] = "fork"
    branch: int
    new: int
    """Number of the new branch."""


class EpisodeEnded(_OfEpisode):
    """The episode ended with an outcome."""

    type: Literal["ended"] = "ended"
    outcome: Outcome


class EpisodeFailed(_OfEpisode):
    """The environment failed, with either a fault or an `RlhfError`."""

    type: Literal["failed"] = "failed"
    fault: str = Field("", max_length=MAX_TEXT_CHARS)
    """Text of an `EnvironmentFault`."""
    error: ErrorMessage | None = None


class StepRecorded(_OfEpisode):
    """A step of an environment that has `state` and `restore` (`Step`)."""

    type: Literal["step"] = "step"
    turn: int
    observation: str | list[dict[str, Any]] | None
    reward: float
    status: Status | None
    state: Any

    def step(self) -> Step:
        """Return the step."""
        return Step(**{name: getattr(self, name) for name in ("turn", "observation", "reward", "status", "state")})


EpisodeMessage = (
    StepRecorded
    | CallStarted
    | TurnRequest
    | EndpointRequest
    | TurnCanceled
    | ForkRequest
    | EpisodeEnded
    | EpisodeFailed
)
FromChild = Ready | EpisodeMessage
_FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="type")])


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """The first message to the child: import the environment's code."""

    recipe: bytes
    """Pickled `Recipe`."""
    num_threads: int
    """Maximum number of concurrent calls."""


@dataclass(frozen=True, slots=True)
class StartEpisode:
    """Starts an episode whose first branch has `state`."""

    episode: int
    task: Task
    state: State
    steps: tuple[Step, ...] = ()
    """Steps to continue after (`Progress.steps`)."""
    is_recorded: bool = False
    """Whether further steps are recorded."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Result of a turn or of an endpoint request, with the state of the branch after it."""

    episode: int
    turn: int
    reply: Reply | Endpoint | Exception
    state: State


def to_picklable(error: Exception) -> Exception:
    """Return the error, or one with its name and text if the child may not have its class."""
    is_known = isinstance(error, RlhfError | EpisodeTruncated | ContextFull) or type(error).__module__ == "builtins"
    return error if is_known else RuntimeError(f"{type(error).__name__}: {error}")


def to_child(message: ImportRequest | StartEpisode | TurnResult) -> bytes:
    """Return a frame for the child. Raises the errors of pickling."""
    return _frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def to_host(message: Mapping[str, Any]) -> bytes:
    """Return a frame for the run. Raises `TypeError` or `ValueError` if a value is not JSON or the frame is too big."""
    data = json.dumps(message, default=_reject, ensure_ascii=False, allow_nan=False).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a turn of {len(data):,} bytes is more than the {MAX_MESSAGE_BYTES:,} that can be sent")
    return _frame(data)


def _reject(value: Any) -> Any:
    raise TypeError(f"{value!r:.100} is not a JSON value, which an isolated environment requires")


def read_from_child(data: bytes) -> FromChild:
    """Parse a message from the child. Raises `BadMessage`."""
    try:
        return _FROM_CHILD.validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise BadMessage(f"wrote an invalid message ({problem['msg']:.200})") from None


def _frame(data: bytes) -> bytes:
    return _HEAD.pack(len(data)) + data


class FrameReader:
    """Splits received bytes into messages of at most `max_bytes`."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the next message, or None until it is complete. Raises `BadMessage` if it is too long."""
        if len(self._buffer) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(self._buffer)[0]
        if self._max_bytes is not None and end - _HEAD.size > self._max_bytes:
            raise BadMessage(f"wrote a message of {end - _HEAD.size:,} bytes, more than {self._max_bytes:,}")
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[_HEAD.size : end])
        del self._buffer[:end]
        return message
