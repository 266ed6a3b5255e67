"""The seam between core and the plugins of `rlhf.endpoints`: the types that a server of the policy takes and returns.

Episodes that are played together share one server (`Endpoints`), with a key for each. A server reads HTTP into a
`Call`, has it answered by whom its key belongs to, and writes the `Answer`. It knows nothing of tokens, episodes or
engines.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from rlhf_core.errors import PluginError
from rlhf_core.plugins.discovery import find, import_target
from rlhf_core.types import FinishReason, ToolCall
from rlhf_web.servers import Refused, ServerLimits

from .contract import Endpoint, Tool

LOOPBACK = "127.0.0.1"
SERVER = "openai"
"""The protocol that is served; any distribution may bring its server."""
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a client."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls made by the assistant."""
    tool_call_id: str | None = None
    """Id of the call that a tool's result answers."""
    call_ids: tuple[str, ...] = field(default=(), compare=False)
    """How the client calls `tool_calls`; they are made up and mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A client's request to continue a conversation or a text."""

    messages: tuple[ChatMessage, ...] = ()
    text: str | None = None
    """A plain text in place of messages."""
    tools: tuple[Tool, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    """This and what follows count where a model is served (`rlhf serve`); in a run its own sampling does."""
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's answer."""

    text: str
    """Without the calls that could be read, and without the text of `Call.stop` that ended it."""
    tool_calls: tuple[ToolCall, ...]
    """Those that could be read."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    turn: int = 0
    """Its number in the episode: for `Outcome.turn_rewards`."""
    policy_version: int = 0


class CallRefused(Refused):
    """A call that is not answered; the client is told why, in OpenAI's form."""


class KeyOwner(Protocol):
    """Whoever a key belongs to: an episode, or a model that is served."""

    async def answer(self, call: Call) -> Answer:
        """Raises `CallRefused`. It is cancelled where the client leaves."""
        ...


FindKey = Callable[[str], KeyOwner | None]
"""Whom a key belongs to."""


class EndpointServer(Protocol):
    """A server that listens."""

    @property
    def base_url(self) -> str:
        """For `OpenAI(base_url=…)`."""
        ...

    def close(self) -> None:
        """Listen no more and cut all connections, at once. Called on the loop it was started on."""
        ...


class StartServer(Protocol):
    """The function that an entry point of `rlhf.endpoints` names."""

    def __call__(self, find_key: FindKey, *, host: str, port: int, limits: ServerLimits) -> Awaitable[EndpointServer]:
        """Listen, on the running event loop; port 0 takes a free one. Raises `UserInputError`."""
        ...


class Keys:
    """Keys, and whom they belong to."""

    def __init__(self) -> None:
        self._owners: dict[str, KeyOwner] = {}

    def add(self, owner: KeyOwner, key: str | None = None) -> str:
        """A new key of his, or the one that is given."""
        made = secrets.token_urlsafe(_KEY_BYTES) if key is None else key
        self._owners[made] = owner
        return made

    def remove(self, key: str) -> None:
        """It opens nothing any more."""
        self._owners.pop(key, None)

    def find(self, given: str) -> KeyOwner | None:
        """Whose it is. How long this takes says nothing about the keys but how many there are."""
        found = None
        for key, owner in self._owners.items():
            if hmac.compare_digest(key.encode(), given.encode("utf-8", "surrogateescape")):
                found = owner
        return found


class Endpoints:
    """On one event loop. The server starts with the first endpoint and ends with `close`."""

    def __init__(self, answering: Callable[[Any], KeyOwner], *, max_connections: int) -> None:
        """answering: makes what answers the calls of an episode."""
        self._answering = answering
        self._limits = ServerLimits(max_connections=max_connections)
        self._keys = Keys()
        self._server: EndpointServer | None = None
        self._starting = asyncio.Lock()

    async def open(self, episode: object) -> Endpoint:
        """An endpoint for one episode. Raises `PluginError` if no server is installed."""
        async with self._starting:
            if self._server is None:
                self._server = await find_server()(self._keys.find, host=LOOPBACK, port=0, limits=self._limits)
        return Endpoint(base_url=self._server.base_url, api_key=self._keys.add(self._answering(episode)))

    def end(self, endpoint: Endpoint) -> None:
        """Its key opens nothing any more."""
        self._keys.remove(endpoint.api_key)

    def close(self) -> None:
        """Nothing listens any more."""
        if self._server is not None:
            self._server.close()


def find_server() -> StartServer:
    """The function that starts the server. Raises `PluginError` saying what to install."""
    try:
        ref = find("endpoints", SERVER)
    except PluginError as error:
        raise PluginError(error.message, where="policy.endpoint()", hint=error.hint) from error
    start = import_target(ref)
    if not callable(start):
        raise PluginError(f"{ref.target} is a {type(start).__name__}, which starts no server", where=ref.label)
    return cast(StartServer, start)
