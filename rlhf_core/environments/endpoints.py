"""The endpoints of the episodes that are played together: one server, a key for each."""

from __future__ import annotations

import asyncio
from typing import cast

from ..errors import PluginError
from ..plugins.discovery import find, import_target
from ..util.servers import ServerLimits
from .contract import Endpoint
from .endpoint import LOOPBACK, Answering, EndpointServer, Keys, StartServer

SERVER = "openai"
"""The protocol that is served; any distribution may bring its server."""


class Endpoints:
    """On one event loop. The server starts with the first endpoint and ends with `close`."""

    def __init__(self, *, max_connections: int) -> None:
        self._limits = ServerLimits(max_connections=max_connections)
        self._keys = Keys()
        self._server: EndpointServer | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def open(self, owner: Answering) -> Endpoint:
        """An endpoint of his own. Raises `PluginError` where no server is installed."""
        async with self._starting:
            if self._server is None:
                self._server = await find_server()(self._keys.find, host=LOOPBACK, port=0, limits=self._limits)
        return Endpoint(base_url=self._server.base_url, api_key=self._keys.add(owner))

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
