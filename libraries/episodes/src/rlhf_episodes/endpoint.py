"""Interface between core and the plugins of `rlhf.endpoints`: the types that a server of the policy takes and returns.

Episodes that are played together share one server (`Endpoints`), with a key for each episode. A server parses HTTP into
a `Call`, has the owner of its key answer it, and writes the `Answer`. It does not know tokens, episodes or engines.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from rlhf_core.errors import PluginError
from rlhf_core.plugins.discovery import find, import_target
from rlhf_core.types import FinishReason, ToolCall
from rlhf_web.servers import Refused, ServerLimits

from .contract import Endpoint, Tool

LOOPBACK = "127.0.0.1"
SERVER = "openai"
"""Name of the plugin that serves endpoints. Any distribution may provide it."""
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a client's conversation."""

    role: str
    content: str = ""
    images: tuple[tuple[int, str], ...] = ()
    """Images in `content`: the number of characters before each, and its `data:`, http or https address."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls made by the assistant."""
    tool_call_id: str | None = None
    """Id of the call that a tool's result answers."""
    call_ids: tuple[str, ...] = field(default=(), compare=False)
    """Ids of `tool_calls`, chosen arbitrarily. They do not count in comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A client's request to continue a conversation or a text."""

    messages: tuple[ChatMessage, ...] = ()
    text: str | None = None
    """Plain text to continue, instead of messages."""
    tools: tuple[Tool, ...] = ()
    forced_tools: tuple[str, ...] = ()
    """Names of tools, one of which the answer has to call."""
    several_calls: bool = True
    """Whether a structured answer may call several tools."""
    answer_schema: Mapping[str, Any] | None = field(default=None, hash=False)
    """JSON schema of the answer, if it does not call tools."""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    """Used when serving a model (`rlhf serve`), like `top_p` and `seed`. A run uses its own sampling options."""
    top_p: float | None = None
    seed: int | None = None
    token_ids: tuple[int, ...] | None = None
    """Tokens to continue, instead of messages or a text. Only a `BatchKeyOwner` receives this and the next two."""
    top_logprobs: int | None = None
    """Number of most likely tokens to report at each position, in addition to the token itself. None: no log-probs."""
    echo: bool = False
    """Whether the answer starts with the prompt. `max_tokens` may then be 0."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-prob of one token under the model, at temperature 1 and without truncation."""

    text: str
    """Text that the token adds. Empty if it ends in the middle of a character."""
    logprob: float | None
    """In nats. None for the first token of a prompt."""
    top: tuple[tuple[str, float], ...] = ()
    """Text and log-prob of the most likely tokens, from most to least likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's answer to a `Call`."""

    text: str
    """Text without the readable calls and without the text of `Call.stop` that ended it."""
    tool_calls: tuple[ToolCall, ...]
    """Calls that could be read."""
    finish_reason: FinishReason
    stop_text: str | None = None
    """Text of `Call.stop` that ended the answer, or None."""
    prompt_tokens: int
    completion_tokens: int
    turn: int = 0
    """Number of the turn in the episode, as in `Outcome.turn_rewards`."""
    policy_version: int = 0
    tokens: tuple[TokenLogprob, ...] | None = None
    """All tokens of the answer, including an end-of-sequence token, and of the prompt before it if `Call.echo`. None
    if `Call.top_logprobs` is not set."""


class CallRefused(Refused):
    """A refused call. The client receives the reason in the error format of its API."""


class KeyOwner(Protocol):
    """Owner of an API key: an episode, or a model that is served.

    The server calls it on its event loop, on the rank whose engine plays the episode. It keeps data for each owner in a
    `weakref.WeakKeyDictionary`, so an owner must be hashable and allow weak references, as objects do by default.

    Example:
        A server handles each request like this::

            owner = find_key(key)
            if owner is None:
                return 401
            answer = await owner.answer(call)  # CallRefused becomes an HTTP error
    """

    async def answer(self, call: Call) -> Answer:
        """Answer a client's call. It is canceled if the client disconnects.

        Args:
            call: The parsed request.

        Raises:
            CallRefused: The call is invalid, or the episode is over or at a limit.
        """

    async def count_tokens(self, call: Call) -> int:
        """Return the number of prompt tokens that the call would have, without answering it.

        Args:
            call: The parsed request.

        Raises:
            CallRefused: The call is invalid, or the episode is over.
        """


@runtime_checkable
class BatchKeyOwner(KeyOwner, Protocol):
    """A `KeyOwner` that answers all calls of a request together, and supports the options of `rlhf serve`.

    Other owners receive one call at a time, and a server refuses requests for several answers to one prompt, for
    log-probs, echo or token ids.

    Example:
        A server handles each request like this::

            if isinstance(owner, BatchKeyOwner):
                answers = await owner.answer_all(calls)
            else:
                answers = [await owner.answer(call) for call in calls]
    """

    async def answer_all(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer the calls of one request, in their order. Canceled if the client disconnects.

        Args:
            calls: The parsed request: one call per answer. They differ in prompt and seed.

        Raises:
            CallRefused: One of the calls is invalid. None of them is answered.
        """


FindKey = Callable[[str], KeyOwner | None]
"""Returns the owner of a key, or None if the key is unknown."""


class EndpointServer(Protocol):
    """A running HTTP server.

    Core starts it when an episode first requests an endpoint, on the event loop of the rank's episodes, and closes it
    after the last episode.

    Example:
        Core uses a server like this::

            server = await start(keys.find, host="127.0.0.1", port=0, limits=limits)
            endpoint = Endpoint(base_url=server.base_url, api_key=keys.add(owner))
            ...  # play episodes
            server.close()
    """

    @property
    def base_url(self) -> str:
        """Base URL of the API, which ends in `/v1`, for `OpenAI(base_url=…)`."""

    def close(self) -> None:
        """Stop listening and close all connections at once. Called on the event loop that started the server."""


class StartServer(Protocol):
    """Type of the function that an entry point of `rlhf.endpoints` names."""

    def __call__(self, find_key: FindKey, *, host: str, port: int, limits: ServerLimits) -> Awaitable[EndpointServer]:
        """Start listening on the running event loop. Port 0 selects a free port. Raises `UserInputError`."""


class Keys:
    """API keys and their owners.

    Example:
        >>> keys = Keys()
        >>> key = keys.add("the owner", "secret")
        >>> keys.find("secret"), keys.find("guess")
        ('the owner', None)
    """

    def __init__(self) -> None:
        self._owners: dict[str, KeyOwner] = {}

    def add(self, owner: KeyOwner, key: str | None = None) -> str:
        """Register a key of the owner and return it. Without `key`, create a random one."""
        new_key = secrets.token_urlsafe(_KEY_BYTES) if key is None else key
        self._owners[new_key] = owner
        return new_key

    def remove(self, key: str) -> None:
        """Revoke a key."""
        self._owners.pop(key, None)

    def find(self, given: str) -> KeyOwner | None:
        """Return the owner of a key, or None. The time it takes reveals only the number of keys."""
        found = None
        for key, owner in self._owners.items():
            if hmac.compare_digest(key.encode(), given.encode("utf-8", "surrogateescape")):
                found = owner
        return found


class Endpoints:
    """Endpoints of the episodes on one event loop. The server starts with the first endpoint and ends with `close`."""

    def __init__(self, make_owner: Callable[[Any], KeyOwner], *, max_connections: int) -> None:
        """`make_owner` creates the object that answers the calls of an episode."""
        self._make_owner = make_owner
        self._limits = ServerLimits(max_connections=max_connections)
        self._keys = Keys()
        self._server: EndpointServer | None = None
        self._starting = asyncio.Lock()

    async def open(self, episode: object) -> Endpoint:
        """Open an endpoint for one episode. Raises `PluginError` if no server is installed."""
        async with self._starting:
            if self._server is None:
                self._server = await find_server()(self._keys.find, host=LOOPBACK, port=0, limits=self._limits)
        return Endpoint(base_url=self._server.base_url, api_key=self._keys.add(self._make_owner(episode)))

    def end(self, endpoint: Endpoint) -> None:
        """Revoke the endpoint's key."""
        self._keys.remove(endpoint.api_key)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.close()


def find_server() -> StartServer:
    """Return the function that starts the server. Raises `PluginError`, naming what to install, if there is none."""
    try:
        ref = find("endpoints", SERVER)
    except PluginError as error:
        raise PluginError(error.message, where="policy.endpoint()", hint=error.hint) from error
    start = import_target(ref)
    if not callable(start):
        raise PluginError(f"{ref.target} is a {type(start).__name__}, not a function", where=ref.label)
    return cast(StartServer, start)
