"""The seam between a dialect (the wire format of one API) and the owners of keys, which answer a `Call`.

A dialect is a package in `dialects/`. It parses a body into a `WireRequest`, which converts itself to calls and the
answers to a response body or a stream. The server knows only the types of this module.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from rlhf_episodes import Answer, Call, CallRefused
from rlhf_web import Refused

from .stored import StoredConversations

R = TypeVar("R", bound="WireRequest")
_MAX_MODEL_CHARS = 200


class Part(BaseModel):
    """Part of a body. Unknown fields are ignored here, and `read` checks those of the body itself."""

    model_config = ConfigDict(strict=True)


class WireRequest(Part):
    """Body of a request in one dialect."""

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that would change an answer and are not supported, with their values without effect."""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change an answer. Any other field, known or not, is refused unless it is null."""
    tags: ClassVar[frozenset[str]] = frozenset()
    """Parts of the location of a validation error that are not in the body."""

    model: Annotated[
        str | None, BeforeValidator(lambda name: None if name is None else str(name)[:_MAX_MODEL_CHARS])
    ] = None

    @abstractmethod
    def calls(self, stored: StoredConversations) -> list[Call]:
        """Return one call per answer.

        Args:
            stored: Earlier conversations of the key, for dialects whose requests refer to them.

        Raises:
            CallRefused: The request refers to an unknown conversation.
        """

    def refusal(self) -> CallRefused | None:
        """Return the refusal of an option of the request that is not supported anywhere, or None."""
        return None

    def served_only(self) -> CallRefused | None:
        """Return the refusal of an option that only a served model supports, or None."""
        return None


class AnswerRequest(WireRequest):
    """A request for answers."""

    stream: bool | None = None

    @abstractmethod
    def answer_body(self, answers: Sequence[Answer], reply_id: str) -> bytes:
        """Encode the response.

        Args:
            answers: The answers to `calls`.
            reply_id: Id of the response, unique over all servers.
        """

    @abstractmethod
    def answer_events(self, answers: Sequence[Answer], reply_id: str) -> Iterator[bytes]:
        """Yield the response as server-sent events. The arguments are those of `answer_body`."""

    def keep(
        self, stored: StoredConversations, calls: Sequence[Call], answers: Sequence[Answer], reply_id: str
    ) -> None:
        """Store the conversation, for dialects whose requests refer to earlier ones."""
        return None


class CountRequest(WireRequest):
    """A request for the number of tokens of a prompt."""

    @abstractmethod
    def count_body(self, num_tokens: int) -> bytes:
        """Encode the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The wire format of one API."""

    requests: Mapping[str, type[WireRequest]]
    """Request classes by path."""
    error_body: Callable[[Refused], bytes]
    """Encodes an error in the form that the API's clients read."""
    models_body: Callable[[str], bytes]
    """Encodes the list of models, which has one entry."""
    version_header: str | None = None
    """Header that only this API's clients send, for paths that several APIs have in common."""


def read(body: bytes, kind: type[R], *, with_extras: bool) -> R:
    """Parse a body.

    Args:
        body: JSON.
        kind: Class of the request.
        with_extras: Whether to accept options that only a served model supports.

    Raises:
        CallRefused: The body is invalid, or contains an unsupported option that would change the answer.
    """
    try:
        parsed = kind.model_validate(parse_json(body))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"] if part not in kind.tags) or "the body"
        message = f"{where}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r:.60})"
        raise invalid(message) from error
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from error
    refused = parsed.refusal() or (None if with_extras else parsed.served_only())
    if refused is not None:
        raise refused
    for name, value in (parsed.model_extra or {}).items():
        if name not in kind.harmless and value is not None and value not in kind.neutral.get(name, ()):
            raise unsupported(name, "omit it")
    return parsed


def invalid(message: str) -> CallRefused:
    """Return the refusal of an invalid request."""
    return CallRefused(400, "invalid_request", message)


def unsupported(name: str, hint: str) -> CallRefused:
    """Return the refusal of an unsupported option.

    Args:
        name: Name of the option.
        hint: What to send instead.
    """
    return CallRefused(400, "unsupported_parameter", f"{name[:100]} is not supported here: {hint}")


def encode(value: Any) -> bytes:
    """Encode JSON in ASCII, since text of a model may contain half of a surrogate pair."""
    return json.dumps(value, allow_nan=False).encode()


def typed_event(value: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event whose name is the `type` in its data."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + encode(value) + b"\n\n"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError`, also for NaN, infinities and deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
