"""Messages between a run and the process of its environments: frames of pickle to it, of checked JSON from it.

The process writes `FromChild`; it is given `Make`, then for each episode a `Play` and an `Answer` for each turn.
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

from ..contract import Endpoint, EpisodeTruncated, Outcome, Reply, Task
from ..episode import State

MAX_MESSAGE_BYTES = 64 << 20
"""Limit on one message from the process; an observation may have a million characters, and a turn several."""
MAX_TEXT_CHARS = 10_000
"""Limit on an error's text, or on the name of a call."""
_HEAD = struct.Struct("!I")


class BadMessage(ValueError):
    """The process wrote something that is no message; the text says why, as the end of a sentence."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ErrorMessage(_Message):
    """An error that is meant for the reader, by the name of its class."""

    kind: str = Field(max_length=100)
    message: str
    where: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: RlhfError) -> ErrorMessage:
        """From an error of core's, or a plugin's subclass of one."""
        kind = next(each.__name__ for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
        return cls(kind=kind, message=error.message, where=error.where, hint=error.hint)

    def error(self) -> RlhfError:
        """The same error on this side."""
        kind = getattr(errors, self.kind, RlhfError)
        kind = kind if isinstance(kind, type) and issubclass(kind, RlhfError) else RlhfError
        return kind(self.message, where=self.where, hint=self.hint)


class Ready(_Message):
    """The environment's code is imported, or cannot be."""

    say: Literal["ready"] = "ready"
    error: ErrorMessage | None = None


class _EpisodeMessage(_Message):
    episode: int
    """Number of the episode (`Play.episode`)."""


class Doing(_EpisodeMessage):
    """A call of the environment begins."""

    say: Literal["doing"] = "doing"
    call: str = Field(max_length=MAX_TEXT_CHARS)


class TurnRequest(_EpisodeMessage):
    """A turn of the policy is asked for in one branch (`Policy.turn`)."""

    say: Literal["turn"] = "turn"
    branch: int
    """Number of the proxy in the process: 0, or one that `ForkRequest` named."""
    turn: int
    """A number that the answer bears."""
    messages: str | list[dict[str, Any]] | None
    tools: list[dict[str, Any]]
    stop: list[str]
    options: dict[str, Any] = Field(default_factory=dict)


class EndpointRequest(_EpisodeMessage):
    """An endpoint is asked for (`Policy.endpoint`)."""

    say: Literal["endpoint"] = "endpoint"
    turn: int
    """A number that the answer bears, of the same count as those of turns."""


class TurnCanceled(_EpisodeMessage):
    """Nobody waits for a turn any more."""

    say: Literal["left"] = "left"
    turn: int


class ForkRequest(_EpisodeMessage):
    """A branch goes on as another one, too (`Policy.fork`)."""

    say: Literal["fork"] = "fork"
    branch: int
    new: int


class Ended(_EpisodeMessage):
    """The episode's outcome."""

    say: Literal["ended"] = "ended"
    outcome: Outcome


class Failed(_EpisodeMessage):
    """The environment failed: what it did, after the name of the call; or an error for the reader."""

    say: Literal["failed"] = "failed"
    fault: str = Field("", max_length=MAX_TEXT_CHARS)
    error: ErrorMessage | None = None


OfEpisode = Doing | TurnRequest | EndpointRequest | TurnCanceled | ForkRequest | Ended | Failed
FromChild = Ready | OfEpisode
_FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="say")])


@dataclass(frozen=True, slots=True)
class Make:
    """The first message to the process: what it is to import."""

    recipe: bytes
    """Pickle of a `Recipe`."""
    num_threads: int
    """Most calls at once."""


@dataclass(frozen=True, slots=True)
class Play:
    """An episode begins; its first branch is in `state`."""

    episode: int
    task: Task
    state: State


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a turn, and the state of its branch after it."""

    episode: int
    turn: int
    reply: Reply | Endpoint | Exception
    state: State


def picklable(error: Exception) -> Exception:
    """The error, or one with its name and text if the process may not know its class."""
    is_known = isinstance(error, RlhfError | EpisodeTruncated) or type(error).__module__ == "builtins"
    return error if is_known else RuntimeError(f"{type(error).__name__}: {error}")


def to_child(message: Make | Play | Answer) -> bytes:
    """A frame for the process. Raises what pickling raises."""
    return _frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def to_host(message: Mapping[str, Any]) -> bytes:
    """A frame for the run. Raises `TypeError` or `ValueError` where a value is no JSON."""
    data = json.dumps(message, default=_refuse, ensure_ascii=False, allow_nan=False).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a turn of {len(data):,} bytes is more than the {MAX_MESSAGE_BYTES:,} that can be sent")
    return _frame(data)


def _refuse(value: Any) -> Any:
    raise TypeError(f"{value!r:.100} is no value of JSON, as messages of an isolated environment have to be")


def read_from_child(data: bytes) -> FromChild:
    """Parse a message from the process. Raises `BadMessage`."""
    try:
        return _FROM_CHILD.validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise BadMessage(f"wrote what is no message ({problem['msg']:.200})") from None


def _frame(data: bytes) -> bytes:
    return _HEAD.pack(len(data)) + data


class Frames:
    """Cuts what arrives into messages of at most `max_bytes`."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        """The next message, or None until it is whole. Raises `BadMessage` where it would be too long."""
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
