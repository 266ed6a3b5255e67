"""Clients that connect and send nothing, half of a request, or take no response."""

import asyncio
import socket
import threading

import pytest
from dashboard_runs import KEY
from running import PATIENCE_SECONDS, wait_until

HALF = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
WHOLE = HALF + f"Authorization: Bearer {KEY}\r\n\r\n".encode()


@pytest.fixture
def port(runs):
    """The page's server, on a thread."""
    from rlhf_dashboard.app import make_app
    from rlhf_dashboard.runs import Runs
    from rlhf_web import ServerLimits, WebServer

    limits = ServerLimits(max_connections=64, idle_seconds=1.0)
    server = WebServer(make_app(Runs(runs), key=KEY, host="127.0.0.1"), limits)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE_SECONDS)

    on_loop(server.listen("127.0.0.1", 0, where="test"))
    yield int(server.address.rpartition(":")[2])
    on_loop(server.stop(PATIENCE_SECONDS))
    on_loop(loop.shutdown_default_executor())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_SECONDS)
    loop.close()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)


def answers(port):
    with connect(port) as connection:
        try:
            connection.sendall(WHOLE)
            return connection.recv(100).startswith(b"HTTP/1.1 200")
        except ConnectionError:
            return False


@pytest.mark.parametrize("sent", [b"", HALF])
def test_half_open_connections_are_closed(port, sent):
    halves = [connect(port) for _ in range(70)]
    try:
        for each in halves:
            each.sendall(sent)
        wait_until(lambda: answers(port), "an answer beside them")
    finally:
        for each in halves:
            each.close()


def test_a_connection_is_closed_when_the_next_request_stays_half(port):
    with connect(port) as connection:
        connection.sendall(WHOLE)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(HALF)
        assert is_cut(connection)


def is_cut(connection):
    """Whether it ends, after what is still on its way."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True
