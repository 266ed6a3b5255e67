"""Downloads: what is allowed, and that each bound holds against a server that does not keep to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhf_web import RemoteError, allowed_host, download

LOCAL = frozenset({"127.0.0.1"})


class Handler(BaseHTTPRequestHandler):
    """Answers by the path of the request."""

    stop = threading.Event()
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        part, _, rest = self.path.partition("?")[0][1:].partition("/")
        if part == "to":
            self._respond(302, location=rest.replace("PORT", str(self.server.server_port)))
        elif part == "busy":
            self._respond(200 if self.asked.count(self.path) > 2 else 503, b"late")
        elif part == "packed":
            self._respond(200, b"x", encoding="gzip")
        elif part == "slow":
            self.send_response(200)
            while not self.stop.wait(0.05):  # one byte of a header at a time
                self.wfile.write(b"x")
        elif part == "endless":
            self.send_response(200)
            self.end_headers()
            while not self.stop.is_set():
                self.wfile.write(b"x" * 10_000)
        else:
            self._respond(200 if part == "file" else 404, b"content")

    def _respond(self, status: int, body: bytes = b"", *, location: str = "", encoding: str = "") -> None:
        self.send_response(status)
        for name, value in (("Location", location), ("Content-Encoding", encoding)):
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is no error."""


@pytest.fixture
def address() -> Iterator[str]:
    Handler.asked.clear()
    Handler.stop.clear()
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        Handler.stop.set()
        server.shutdown()
        thread.join()


def get(url: str, hosts: Any = LOCAL, **limits: Any) -> bytes:
    return download(url, hosts=hosts, **{"max_bytes": 100, "seconds": 20.0, **limits})


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("file?key=secret", b"content"),
        ("to//file", b"content"),
        ("to/http://127.0.0.1:PORT/to//file", b"content"),
        ("busy/1", b"late"),
    ],
)
def test_a_file_is_downloaded(address: str, path: str, content: bytes) -> None:
    assert get(f"{address}/{path}") == content


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("none?key=secret", "/none: status 404"),
        ("to/http://localhost:PORT/file", "the host localhost is not allowed"),
        ("to/file:///etc/passwd", "should be http"),
        ("to/ftp://127.0.0.1/x", "should be http"),
        ("to/http://[bad/x", "it redirects to no address"),
        ("\x01?key=secret", "not an address"),
        ("x" * 70_000, "URL too long"),
        ("to/http://user:secret@127.0.0.1:PORT/file", "contains credentials"),
        ("packed", "its response is compressed"),
        ("endless", "it has more than 100 bytes"),
    ],
)
def test_what_is_refused(address: str, path: str, problem: str) -> None:
    with pytest.raises(RemoteError, match=problem) as raised:
        get(f"{address}/{path}")
    assert "key=secret" not in str(raised.value)


def test_redirects_end(address: str) -> None:
    with pytest.raises(RemoteError, match="more than 5 redirects"):
        get(f"{address}/to/" + "/to/" * 8)
    assert len(Handler.asked) == 6


def test_a_server_that_sends_headers_byte_by_byte_meets_the_deadline(address: str) -> None:
    with pytest.raises(RemoteError, match="no complete response in 0.5 s"):
        get(f"{address}/slow", seconds=0.5)


@pytest.mark.parametrize("hosts", [("*",), ("*.0.0.1",), ("*", "localhost")], ids=str)
def test_a_private_address_must_be_listed_itself(address: str, hosts: tuple[str, ...]) -> None:
    with pytest.raises(RemoteError, match=r"the host has a private address \(127.0.0.1\), and is not in the list"):
        get(f"{address}/file", set(hosts))
    assert not Handler.asked


@pytest.mark.parametrize(
    "found",
    [
        "10.0.0.5",
        "169.254.169.254",
        "::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::7f00:1",
        "::7f00:1",
        "::ffff:0:7f00:1",
        "fec0::1",
        "2002:7f00:1::",
        "224.0.0.1",
    ],
)
def test_a_public_name_of_a_private_address_is_not_reached(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its other addresses are public."""

    async def getaddrinfo(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        return [(0, 0, 0, "", (each, port)) for each in ("93.184.215.14", found)]

    monkeypatch.setattr("asyncio.BaseEventLoop.getaddrinfo", getaddrinfo)
    with pytest.raises(RemoteError, match="the host has a private address"):
        get("http://images.example.org/x.png", {"*.example.org"})


def test_an_international_host_is_refused_unless_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        return [(0, 0, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr("asyncio.BaseEventLoop.getaddrinfo", getaddrinfo)
    with pytest.raises(RemoteError, match="not an address"):
        get("http://b\xfccher.example/x.png", {"*"})


def test_a_host_that_is_an_entry_with_a_star_is_not_listed_itself() -> None:
    """A name server may answer for it, with a private address."""
    for entry in ("*", "*.example.org"):
        with pytest.raises(RemoteError, match="is not allowed"):
            get(f"http://{entry}/x.png", {entry})


def test_hosts_are_matched_by_labels() -> None:
    for host in ("evilexample.org", "example.org", "example.org.evil.net"):
        with pytest.raises(RemoteError, match=f"the host {host} is not allowed"):
            get(f"http://{host}/x.png", {"*.example.org"})


@pytest.mark.parametrize(
    "entry", ["http://example.org", "example.org/x", "example.org:80", "exa*.org", "", "*.", "a b"]
)
def test_an_entry_must_be_a_host(entry: str) -> None:
    with pytest.raises(ValueError, match="is not a host"):
        allowed_host(entry)


@pytest.mark.parametrize("entry", ["Example.ORG", "*.example.org", "*", "10.0.0.5", "::1", "localhost"])
def test_hosts_names_and_addresses_are_entries(entry: str) -> None:
    assert allowed_host(entry) == entry.lower()
