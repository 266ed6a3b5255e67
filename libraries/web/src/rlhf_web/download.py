"""Downloads of files from allowed hosts, with bounds on bytes and time, which cannot reach a private network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urljoin

import httpx2 as httpx

from .client import RemoteError
from .servers import address_parts

_MAX_REDIRECTS = 5
_MAX_ATTEMPTS = 3
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_TUNNELS = tuple(map(ip_network, ("64:ff9b::/96", "2001::/32", "2002::/16")))
"""IPv6 addresses that contain an IPv4 address, which may be a private one."""


def download(url: str, *, hosts: Collection[str], max_bytes: int, seconds: float) -> bytes:
    """Download a file. May be called in any thread.

    The addresses of a host are checked before connecting to one of them. Private ones are used only if the host itself
    is in `hosts`. Redirects may lead to allowed hosts only. Proxies are not used, since they look up hosts themselves.

    Args:
        url: Address of the file, http or https.
        hosts: Allowed hosts, as `rlhf_web.allowed_host` returns them.
        max_bytes: Maximum size of the file.
        seconds: Maximum total time.

    Returns:
        The file's bytes.

    Raises:
        RemoteError: The file cannot be downloaded. The message contains the address without its query.
    """
    # A thread, since the caller may already run an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _Download(hosts, max_bytes).get(url, seconds)).result()


class _Download:
    def __init__(self, hosts: Collection[str], max_bytes: int) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes

    async def get(self, url: str, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds), self._client(seconds) as client:
                for _ in range(_MAX_REDIRECTS + 1):
                    content, target = await self._try(client, url)
                    if target is None:
                        return content
                    url = urljoin(url, target)
        except TimeoutError:
            raise RemoteError(f"{_shown(url)}: no complete response in {seconds:g} s", is_lost=True) from None
        raise RemoteError(f"{_shown(url)}: more than {_MAX_REDIRECTS} redirects")

    @staticmethod
    def _client(seconds: float) -> httpx.AsyncClient:
        """Return a client that uses each connection once, since its certificate is that of one host."""
        return httpx.AsyncClient(trust_env=False, timeout=seconds, limits=httpx.Limits(max_keepalive_connections=0))

    async def _try(self, client: httpx.AsyncClient, url: str) -> tuple[bytes, str | None]:
        """Return the content of an address, or the target of a redirect. Repeats failed attempts."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                return await self._once(client, url)
            except (RemoteError, httpx.TransportError) as error:
                again = not isinstance(error, RemoteError) or error.status in _AGAIN
                if not again or attempt == _MAX_ATTEMPTS:
                    if isinstance(error, RemoteError):
                        raise
                    reason = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise RemoteError(f"{_shown(url)}: {reason}", is_lost=True) from None
                await asyncio.sleep(0.5 * attempt)
        raise AssertionError("unreachable")

    async def _once(self, client: httpx.AsyncClient, url: str) -> tuple[bytes, str | None]:
        try:
            parts = address_parts(url)
        except ValueError as error:
            raise RemoteError(f"{_shown(url)}: {error}") from None
        host = str(parts.hostname)
        address = await self._address(host, parts.port or (443 if parts.scheme == "https" else 80), _shown(url))
        target = httpx.URL(url).copy_with(host=str(address), fragment=None)
        headers = {
            "Host": parts.netloc,
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "User-Agent": "rlhf (dataset download)",
        }
        # The certificate must be that of the host, not of its address.
        request = client.stream("GET", target, headers=headers, extensions={"sni_hostname": host})
        async with request as response:
            if response.is_redirect:
                return b"", response.headers.get("Location", "")
            if response.status_code != 200:
                raise RemoteError(f"{_shown(url)}: status {response.status_code}", status=response.status_code)
            if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
                raise RemoteError(f"{_shown(url)}: its response is compressed, which the request did not accept")
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > self._max_bytes:
                    raise RemoteError(f"{_shown(url)}: it has more than {self._max_bytes:,} bytes")
            return bytes(content), None

    async def _address(self, host: str, port: int, shown: str) -> IPv4Address | IPv6Address:
        """Return an address of an allowed host, which the request connects to, so that it cannot change in between."""
        if not any(_matches(host, each) for each in self._hosts):
            raise RemoteError(f"{shown}: the host {host} is not allowed")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise RemoteError(f"{shown}: the host is not found ({error})", is_lost=True) from None
        addresses = [ip_address(each[4][0]) for each in found]
        if host not in self._hosts and not all(map(_is_public, addresses)):
            private = next(each for each in addresses if not _is_public(each))
            raise RemoteError(f"{shown}: the host has a private address ({private}), and is not in the list itself")
        return addresses[0]


def _matches(host: str, entry: str) -> bool:
    return entry in ("*", host) or (entry.startswith("*.") and host.endswith(entry[1:]))


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    inner = getattr(address, "ipv4_mapped", None) or address
    return inner.is_global and not inner.is_multicast and not any(inner in each for each in _TUNNELS)


def _shown(url: str) -> str:
    """Return an address without its query, which may contain a key."""
    return url.partition("?")[0].partition("#")[0][:120]
