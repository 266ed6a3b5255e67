"""What the server takes, refuses and bounds, over raw sockets and by the real client."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import openai
import psutil
import pytest
from running import PATIENCE_SECONDS, wait_until

from rlhf_episodes import Answer, Keys
from rlhf_serve.server import start
from rlhf_web import Bodies, Refused, ServerLimits
from rlhf_web.connection import MAX_PIPELINED_BYTES

KEY = "k3y"
BODY = json.dumps({"model": "m", "prompt": "3+4="}).encode()
REPLY = Answer(text="7", tool_calls=(), finish_reason="stop", prompt_tokens=4, completion_tokens=2)


class Owner:
    """Answers at once, or when it is told to."""

    def __init__(self, waits=False):
        self.calls, self.cancelled = [], 0
        self.inside = threading.Semaphore(0)
        self.go = None if not waits else asyncio.Event()

    async def answer(self, call):
        self.calls.append(call)
        self.inside.release()
        try:
            if self.go is not None:
                await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return REPLY


@contextmanager
def serving(owner, model=None, **limits):
    """A server on a thread of its own: (port, its loop)."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE_SECONDS)

    async def end(server):
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)

    keys = Keys()
    keys.add(owner, KEY)
    server = on_loop(start(keys.find, host="127.0.0.1", port=0, limits=ServerLimits(**limits), model=model))
    try:
        yield int(server.base_url.split(":")[2].removesuffix("/v1")), loop
    finally:
        on_loop(end(server))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_SECONDS)
        loop.close()


def request(method="POST", path="/v1/completions", body=BODY, key=KEY, length=None, **headers):
    given = {
        "Host": "h",
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body) if length is None else length),
    }
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value is not None)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)


def response(connection):
    """Status, headers and body of one response."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(status.split()[1]), headers, json.loads(body) if body else None


def test_a_connection_brings_many_requests_also_at_once():
    with serving(Owner()) as (port, _), connect(port) as connection:
        for _ in range(2):
            connection.sendall(request())
            status, _, body = response(connection)
            assert (status, body["choices"][0]["text"], body["usage"]["total_tokens"]) == (200, "7", 6)
        connection.sendall(request(body=b"[]"))
        assert response(connection)[0] == 400
        connection.sendall(request() + request(method="GET", path="/v1/models", body=b""))
        wait_until(lambda: b'"rlhf"' in connection.recv(65536, socket.MSG_PEEK), "the second response")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"key": "wrong"}, 401),
        ({"key": "k\xe4y"}, 401),
        ({"Authorization": None}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"path": "/"}, 404),
        ({"path": "/v1/models"}, 405),
        ({"method": "GET", "body": b""}, 405),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": None}, 411),
        ({"Content_Length": None, "Transfer_Encoding": "chunked", "body": b""}, 411),
        ({"body": b" " * 2000}, 413),
        ({"method": "GET", "path": "/v1/models"}, 413),
        ({"body": b"", "length": 10**17}, 413),
    ],
    ids=str,
)
def test_what_is_refused_before_it_is_read(change, status):
    owner = Owner()
    with serving(owner, max_body_bytes=1000, idle_seconds=0.5) as (port, _), connect(port) as connection:
        connection.sendall(request(**change))
        found, _, body = response(connection)
        assert found == status
        assert body["error"]["message"] and body["error"]["type"] == "invalid_request_error"
        assert connection.recv(1) == b"", "what it still sends is waited for no longer than for a request"
    assert owner.calls == []


@pytest.mark.parametrize("change", [{"method": "HEAD"}, {"method": "CONNECT"}, {"Upgrade": "websocket"}, {"key": "no"}])
def test_unusual_requests_are_answered_like_others(change, caplog):
    with serving(Owner()) as (port, _), connect(port) as connection:
        connection.sendall(request(**{"method": "HEAD", "body": b"", **change}))
        assert connection.recv(65536).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 405 "))
    assert not caplog.records


def test_a_call_that_fails_is_told(caplog):
    class Fails(Owner):
        async def answer(self, call):
            raise ZeroDivisionError("secret")

    with serving(Fails()) as (port, _), connect(port) as connection:
        for _ in range(2):
            connection.sendall(request())
            status, _, body = response(connection)
            assert (status, body["error"]["type"]) == (500, "server_error") and "secret" not in body["error"]["message"]
    assert "secret" in caplog.text


def test_the_client_is_told_of_a_large_body_and_of_a_wrong_key():
    with serving(Owner(), max_body_bytes=100_000) as (port, _):
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(model="m", prompt="x" * 5_000_000)
            assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
            assert [model.id for model in client.models.list()] == ["policy"]
        other = openai.OpenAI(base_url=url, api_key="other", max_retries=0)
        with other as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_more_connections_than_there_may_be_are_refused():
    with serving(Owner(), max_connections=2) as (port, _):
        kept = [connect(port) for _ in range(2)]
        for connection in kept:
            connection.sendall(request())
            assert response(connection)[0] == 200
        with connect(port) as third:
            assert third.recv(100).startswith(b"HTTP/1.1 503 ")
        kept.pop().close()
        wait_until(lambda: takes_another(port), "the place of a connection that was closed")
        kept.pop().close()


def takes_another(port):
    with connect(port) as connection:
        try:
            connection.sendall(request())
            return connection.recv(100).startswith(b"HTTP/1.1 200")
        except ConnectionError:
            return False


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", request()[:60], request()[:-5], request(length=100)], ids=range(5)
)
def test_a_client_that_sends_half_and_waits_is_left(sent):
    with serving(Owner(), idle_seconds=0.2) as (port, _), connect(port) as slow:
        slow.sendall(sent)
        assert slow.recv(100) == b""


def test_a_request_that_comes_drop_by_drop_is_let_go():
    """Each byte comes in time, and the request never ends: one deadline holds for all of it."""
    with serving(Owner(), idle_seconds=0.3) as (port, _), connect(port) as slow:
        slow.settimeout(0.05)
        slow.sendall(request(length=10_000))
        for _ in range(400):
            try:
                slow.sendall(b"x")
                if slow.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the server still listens to it")


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01" * 20, b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000])
def test_garbage_and_endless_headers_are_refused(garbage):
    with serving(Owner()) as (port, _), connect(port) as connection:
        connection.sendall(garbage + b"\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
        assert is_cut(connection)


def test_bodies_are_bounded_together_while_they_are_read():
    with serving(Owner(), max_bytes_in_flight=1500) as (port, _), connect(port) as second:
        with connect(port) as first:
            first.sendall(request(body=b"x", length=1000))
            with connect(port) as small:
                small.sendall(request())
                assert response(small)[0] == 200
            second.sendall(request(body=BODY + b" " * (1000 - len(BODY))))
            second.settimeout(0.2)
            with pytest.raises(TimeoutError):
                second.recv(1)
        second.settimeout(PATIENCE_SECONDS)
        assert response(second)[0] == 200
        second.sendall(request(body=BODY + b" " * 3000))
        assert response(second)[0] == 200, "larger than all together: alone"


def test_a_body_waits_so_long_for_its_place_and_no_longer():
    async def wait():
        bodies = Bodies(ServerLimits(max_bytes_in_flight=10, wait_seconds=0.01))
        async with bodies.place(8):
            with pytest.raises(Refused, match="busy"):
                await bodies.place(8).__aenter__()
        async with bodies.place(8):
            pass

    asyncio.run(wait())


def test_a_client_that_leaves_takes_its_call_with_it():
    owner = Owner(waits=True)
    with serving(owner) as (port, _):
        with connect(port) as connection:
            connection.sendall(request())
            assert owner.inside.acquire(timeout=PATIENCE_SECONDS)
        wait_until(lambda: owner.cancelled == 1, "the call to be cancelled")


@pytest.mark.parametrize("num_bytes", [1, 1000])
def test_a_client_that_leaves_after_bytes_of_its_next_request_takes_its_call_with_it(num_bytes):
    owner = Owner(waits=True)
    with serving(owner) as (port, _):
        with connect(port) as connection:
            connection.sendall(request())
            assert owner.inside.acquire(timeout=PATIENCE_SECONDS)
            connection.sendall(request(length=10_000)[:num_bytes])
            time.sleep(0.1)  # they are read apart from what follows
            assert owner.cancelled == 0
        wait_until(lambda: owner.cancelled == 1, "the call to be cancelled")


@pytest.mark.parametrize("length", [len(BODY), 10 * MAX_PIPELINED_BYTES])
def test_a_request_sent_during_another_is_answered_after_it(length):
    owner = Owner(waits=True)
    with serving(owner) as (port, loop), connect(port) as connection:
        connection.sendall(request())
        assert owner.inside.acquire(timeout=PATIENCE_SECONDS)
        sending = threading.Thread(target=connection.sendall, args=(request(body=BODY.ljust(length)),))
        sending.start()
        time.sleep(0.1)
        assert len(owner.calls) == 1 and owner.cancelled == 0
        loop.call_soon_threadsafe(owner.go.set)
        received = b""
        while received.count(b'"total_tokens"') < 2:
            received += (part := connection.recv(65536))
            assert part, received
        sending.join(PATIENCE_SECONDS)
        assert received.count(b"HTTP/1.1 200") == 2
        assert len(owner.calls) == 2


def test_closing_cuts_what_is_open_and_nothing_listens():
    owner = Owner(waits=True)
    with serving(owner) as (port, _):
        idle, busy = connect(port), connect(port)
        busy.sendall(request())
        assert owner.inside.acquire(timeout=PATIENCE_SECONDS)
        mine = [each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
        assert {each.laddr.ip for each in mine if each.laddr.port == port} == {"127.0.0.1"}
    assert is_cut(idle) and is_cut(busy)
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def is_cut(connection):
    with connection:
        try:
            while connection.recv(65536):
                pass
        except ConnectionError:
            pass
        return True


def test_keys_are_told_apart_and_forgotten():
    keys, one, two = Keys(), Owner(), Owner()
    first, second = keys.add(one), keys.add(two)
    assert (keys.find(first), keys.find(second), keys.find(first[:-1]), keys.find("")) == (one, two, None, None)
    keys.remove(first)
    assert keys.find(first) is None and len(second) >= 40
