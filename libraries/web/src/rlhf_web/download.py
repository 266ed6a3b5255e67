"""Downloads of files from allowed hosts, with bounds on bytes and time, which cannot reach a private network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urljoin

import httpx2 as httpx

from .client import RemoteError, tls_context
from .servers import address_parts

_MAX_REDIRECTS = 5
_MAX_ATTEMPTS = 3
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_UNICAST = ip_network("2000::/3")
"""Public IPv6 addresses. Others may be local, or contain a private IPv4 address, as those of NAT64 do."""
_TUNNELS = tuple(map(ip_network, ("2001::/32", "2002::/16")))
"""Public IPv6 addresses that contain an IPv4 address."""


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


def check_host(url: str, hosts: Collection[str]) -> SplitResult:
    """Check that the host of an address is allowed, without looking it up.

    Args:
        url: The address.
        hosts: Allowed hosts, as `rlhf_web.allowed_host` returns them.

    Returns:
        The parts of the address.

    Raises:
        RemoteError: It is not allowed, or the address is invalid.
    """
    try:
        parts = address_parts(url)
    except ValueError as error:
        raise RemoteError(f"{_shown(url)}: {error}") from None
    host = str(parts.hostname)
    if "*" in host or not any(_matches(host, each) for each in hosts):
        raise RemoteError(f"{_shown(url)}: the host {host} is not allowed")
    return parts


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
                    url = _joined(url, target)
        except TimeoutError:
            raise RemoteError(f"{_shown(url)}: no complete response in {seconds:g} s", is_lost=True) from None
        raise RemoteError(f"{_shown(url)}: more than {_MAX_REDIRECTS} redirects")

    @staticmethod
    def _client(seconds: float) -> httpx.AsyncClient:
        """Return a client that uses each connection once, since its certificate is that of one host."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(verify=tls_context(False), trust_env=False, timeout=seconds, limits=limits)

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
        parts = check_host(url, self._hosts)
        host = str(parts.hostname)
        try:
            target = httpx.URL(url)
            sent_host = parts.netloc.encode("ascii")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise RemoteError(f"{_shown(url)}: not an address: {error}") from None
        address = await self._address(host, parts.port or (443 if parts.scheme == "https" else 80), _shown(url))
        target = target.copy_with(host=str(address), fragment=None)
        headers = {
            b"Host": sent_host,
            b"Accept": b"*/*",
            b"Accept-Encoding": b"identity",
            b"User-Agent": b"rlhf (dataset download)",
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
    if not inner.is_global or inner.is_multicast:
        return False
    return inner.version == 4 or (inner in _UNICAST and not any(inner in each for each in _TUNNELS))


def _joined(url: str, target: str) -> str:
    """Return the address that a redirect leads to."""
    try:
        return urljoin(url, target)
    except ValueError as error:
        raise RemoteError(f"{_shown(url)}: it redirects to no address ({error})") from None


def _shown(url: str) -> str:
    """Return an address without its query, which may contain a key."""
    return url.partition("?")[0].partition("#")[0][:120]
