"""Messages between a run and the process of its environments: frames of pickle to it, of checked JSON from it.

The process writes `FromChild`; it is given tuples whose first part is a `Command`.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlhf_core import errors
from rlhf_core.errors import RlhfError

from ..contract import EpisodeTruncated, Status

MAX_MESSAGE_BYTES = 64 << 20
"""Limit on one message from the process; an observation may have a million characters, and a turn several."""
MAX_TEXT_CHARS = 10_000
"""Limit on an error's text, or on the name of a call."""
_HEAD = struct.Struct("!I")

Command = Literal["make", "play", "answer", "ping"]
"""make: a recipe's pickle and a number of threads, first of all; play: an `Opening`; answer: an `Answer`."""


class BadMessage(ValueError):
    """The process wrote something that is no message; the text says why, as the end of a sentence."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ErrorTold(_Message):
    """An error that is meant for the reader, by the name of its class."""

    kind: str = Field(max_length=100)
    message: str
    where: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: RlhfError) -> ErrorTold:
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
    error: ErrorTold | None = None


class Pong(_Message):
    """An answer to a ping: the process can go on."""

    say: Literal["pong"] = "pong"
    ping: int


class Doing(_Message):
    """A call of the environment begins."""

    say: Literal["doing"] = "doing"
    episode: int
    call: str = Field(max_length=MAX_TEXT_CHARS)


class TurnAsked(_Message):
    """A turn of the policy is asked for in one branch (`Policy.turn`)."""

    say: Literal["turn"] = "turn"
    episode: int
    branch: int
    """Number of the proxy in the process: 0, or one that `ForkAsked` named."""
    turn: int
    """A number that the answer bears."""
    messages: str | list[dict[str, Any]] | None
    tools: list[dict[str, Any]]
    stop: list[str]
    options: dict[str, Any] = Field(default_factory=dict)


class EndpointAsked(_Message):
    """An endpoint is asked for (`Policy.endpoint`)."""

    say: Literal["endpoint"] = "endpoint"
    episode: int
    turn: int
    """A number that the answer bears, of the same count as those of turns."""


class TurnLeft(_Message):
    """Nobody waits for a turn any more."""

    say: Literal["left"] = "left"
    episode: int
    turn: int


class ForkAsked(_Message):
    """A branch goes on as another one, too (`Policy.fork`)."""

    say: Literal["fork"] = "fork"
    episode: int
    branch: int
    new: int


class Ended(_Message):
    """An episode's outcome."""

    say: Literal["ended"] = "ended"
    episode: int
    reward: float
    turn_rewards: list[tuple[int, float]]
    metrics: dict[str, float]
    status: Status
    bad_tool_calls: int = Field(0, ge=0)
    columns: dict[str, Any] = Field(default_factory=dict)


class Failed(_Message):
    """An episode's environment failed: what it did, after the name of the call; or an error for the reader."""

    say: Literal["failed"] = "failed"
    episode: int
    fault: str = Field("", max_length=MAX_TEXT_CHARS)
    error: ErrorTold | None = None


OfEpisode = Doing | TurnAsked | EndpointAsked | TurnLeft | ForkAsked | Ended | Failed
FromChild = Ready | Pong | OfEpisode
_FROM_CHILD: TypeAdapter[FromChild] = TypeAdapter(Annotated[FromChild, Field(discriminator="say")])


@dataclass(frozen=True, slots=True)
class Opening:
    """First state of the policy's proxy; `left` and `room` are those of `Episode`."""

    remaining_turns: int
    max_new_tokens: int
    """Token limit of a turn."""
    left: int | None
    room: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn's reply or error, and what the proxy of its branch has to know after it (see `Opening`)."""

    reply: Any
    """A `Reply`, an `Endpoint`, or what `told_error` gave."""
    left: int | None
    room: int | None
    can_fork: bool


def told_error(error: Exception) -> tuple[str, str] | RlhfError:
    """An error as the process is told of it: one of core's as it is, any other by name and text."""
    return error if isinstance(error, RlhfError) else (type(error).__name__, str(error))


def error_as_told(told: tuple[str, str] | RlhfError) -> Exception:
    """The error again; of a kind that is not known here, one by the same name."""
    if isinstance(told, RlhfError):
        return told
    name, text = told
    known = {each.__name__: each for each in (EpisodeTruncated, ValueError, TypeError, RuntimeError)}
    kind: type[Exception] = known.get(name) or type(name, (Exception,), {})
    return kind(text)


def to_child(command: Command, *values: Any) -> bytes:
    """A frame for the process. Raises what pickling raises."""
    return _frame(pickle.dumps((command, *values), protocol=pickle.HIGHEST_PROTOCOL))


def to_host(message: BaseModel) -> bytes:
    """A frame for the run. Raises `TypeError` or `ValueError` where a value is no JSON."""
    # By json and not by pydantic, which would write values of other types in ways of its own.
    data = json.dumps(message.__dict__, default=_plain, ensure_ascii=False, allow_nan=False).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a turn of {len(data):,} bytes is more than the {MAX_MESSAGE_BYTES:,} that can be sent")
    return _frame(data)


def _plain(value: Any) -> Any:
    if isinstance(value, ErrorTold):
        return value.__dict__
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

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no part of a message has arrived."""
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are whole now. Raises `BadMessage` where one would be too long."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEAD.size:
                (length,) = _HEAD.unpack_from(self._buffer, start)
                if self._max_bytes is not None and length > self._max_bytes:
                    raise BadMessage(f"wrote a message of {length:,} bytes, more than {self._max_bytes:,}")
                if len(self._buffer) - start - _HEAD.size < length:
                    break
                start += _HEAD.size
                message = bytes(self._buffer[start : start + length])
                start += length
                yield message
        finally:
            del self._buffer[:start]
