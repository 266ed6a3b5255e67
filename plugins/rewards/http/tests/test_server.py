"""What the server takes, refuses and bounds."""

import http.client
import json
import socket
import threading
from contextlib import closing

import pytest
from http_rewards import make_rollout, number, serving
from running import PATIENCE_SECONDS

from rlhf_core.errors import RewardError
from rlhf_reward_http.protocol import encode_request

JSON = {"Content-Type": "application/json"}
BODY = encode_request([make_rollout(7)])


def connect(server):
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)


def request(connection, method="POST", path="/v1/score", body=BODY, headers=JSON):
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    return answer.status, json.loads(content) if content else None, answer.headers


def test_a_connection_brings_many_requests():
    with serving(number) as server:
        connection = connect(server)
        for _ in range(3):
            assert request(connection)[:2] == (200, {"protocol": 1, "scores": [7.0]})
        assert request(connection, "GET", "/v1/health", None, {})[1] == {"protocol": 1, "status": "ok", "in_flight": 0}
        assert request(connection, body=b"{}")[:2] == (400, {"protocol": 1, "error": "protocol: Field required"})
        assert request(connection)[0] == 200
        connection.close()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"path": "/"}, 404),
        ({"method": "GET", "path": "/", "body": None}, 404),
        ({"headers": {}}, 415),
        ({"headers": {"Content-Type": "text/plain"}}, 415),
        ({"headers": JSON | {"Transfer-Encoding": "chunked"}, "body": None}, 411),
        ({"body": b" " * 2000}, 413),
        ({"method": "PUT"}, 405),
    ],
    ids=str,
)
def test_what_is_refused_before_it_is_read(change, status):
    with serving(number, max_body_bytes=1000) as server:
        connection = connect(server)
        assert_refused(connection, change, status)
        connection.close()
        assert server.requests == 0


def assert_refused(connection, change, status):
    values = {"method": "POST", "path": "/v1/score", "body": BODY, "headers": JSON} | change
    connection.request(values["method"], values["path"], values["body"], values["headers"])
    assert connection.getresponse().status == status


def test_the_token_is_asked_for():
    with serving(number, token="t0ken") as server:
        for given, status in [(None, 401), ("Bearer wrong", 401), ("Bearer t\xe9", 401), ("Bearer t0ken", 200)]:
            connection = connect(server)
            headers = JSON | ({"Authorization": given} if given else {})
            assert request(connection, headers=headers)[0] == status
            connection.close()


def test_a_reward_that_fails_is_told_and_the_server_goes_on():
    def fails_once(rollouts, failed=[]):  # noqa: B006 - remembers
        if not failed:
            failed.append(True)
            raise RewardError("dist 1.0: raised ValueError: no", where='reward "r"')
        return number(rollouts)

    with serving(fails_once) as server:
        connection = connect(server)
        status, said, _ = request(connection)
        assert (status, said["error"]) == (500, 'reward "r": dist 1.0: raised ValueError: no')
        assert request(connection)[0] == 200
        connection.close()


def test_more_than_the_places_are_told_to_come_again():
    inside, go_on = threading.Semaphore(0), threading.Event()

    def blocks(rollouts):
        inside.release()
        go_on.wait(PATIENCE_SECONDS)
        return number(rollouts)

    with serving(blocks, max_in_flight=2, wait_seconds=0.05) as server:
        busy = [connect(server) for _ in range(2)]
        for connection in busy:
            connection.request("POST", "/v1/score", BODY, JSON)
            assert inside.acquire(timeout=PATIENCE_SECONDS)
        late = connect(server)
        status, said, headers = request(late)
        assert (status, said["error"], headers["Retry-After"]) == (503, "busy", "1")
        go_on.set()
        assert [json.loads(each.getresponse().read())["scores"] for each in busy] == [[7.0], [7.0]]
        assert request(late)[0] == 200, "the refused body was read past: the connection is in step"
        assert server.most_at_once == 2
        for connection in (*busy, late):
            connection.close()


def test_more_connections_than_there_may_be_are_refused():
    with serving(number, max_connections=2) as server:
        kept = [connect(server) for _ in range(2)]
        for connection in kept:
            assert request(connection)[0] == 200
        third = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
        assert third.recv(100).startswith(b"HTTP/1.1 503 ")
        third.close()
        for connection in kept:
            connection.close()


def test_a_client_that_sends_half_and_waits_is_left():
    with serving(number, idle_seconds=0.2) as server:
        slow = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
        head = b"POST /v1/score HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        slow.sendall(head + b"{")
        assert slow.recv(100) == b""
        slow.close()
        with closing(connect(server)) as connection:
            assert request(connection, "GET", "/v1/health", None, {})[1]["in_flight"] == 0


def test_stopping_ends_idle_connections_and_lets_what_runs_answer():
    inside, go_on = threading.Event(), threading.Event()

    def blocks(rollouts):
        inside.set()
        go_on.wait(PATIENCE_SECONDS)
        return number(rollouts)

    with serving(blocks) as server:
        idle, busy = connect(server), connect(server)
        idle.connect()
        busy.request("POST", "/v1/score", BODY, JSON)
        assert inside.wait(PATIENCE_SECONDS)
        stopped = []
        stopping = threading.Thread(target=lambda: stopped.append(server.stop(20.0)))
        stopping.start()
        assert idle.sock.recv(1) == b""
        go_on.set()
        assert json.loads(busy.getresponse().read())["scores"] == [7.0]
        stopping.join(PATIENCE_SECONDS)
        assert stopped == [True]
        for connection in (idle, busy):
            connection.close()


def test_stopping_has_a_deadline():
    go_on = threading.Event()
    inside = threading.Event()

    def hangs(rollouts):
        inside.set()
        go_on.wait(PATIENCE_SECONDS)
        return number(rollouts)

    with serving(hangs) as server:
        busy = connect(server)
        busy.request("POST", "/v1/score", BODY, JSON)
        assert inside.wait(PATIENCE_SECONDS)
        assert server.stop(0.1) is False
        go_on.set()
        busy.close()


@pytest.mark.parametrize(
    "start", [b"", b"POST /v1/score HTTP/1.1\r\nHost: h\r\nContent-Le", None], ids=["line", "headers", "body"]
)
def test_a_request_that_comes_drop_by_drop_is_let_go(start):
    """Each byte comes in time, and the request never ends: one deadline holds for all of it."""
    head = b"POST /v1/score HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    with serving(number, idle_seconds=0.5) as server, socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.settimeout(0.1)
        slow.sendall(head if start is None else start)
        for _ in range(200):
            try:
                slow.sendall(b"x")
                if slow.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the server still listens to it after 20 seconds")


def once(server, body):
    with closing(connect(server)) as connection:
        return request(connection, body=body)


def test_bodies_in_flight_are_bounded_together():
    body = BODY + b" " * (1000 - len(BODY))
    entered, go = threading.Semaphore(0), threading.Event()

    def slow(rollouts):
        entered.release()
        assert go.wait(30)
        return [1.0] * len(rollouts)

    with serving(slow, max_bytes_in_flight=2100, max_in_flight=8, wait_seconds=0.2) as server:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(once(server, body)[0])) for _ in range(2)]
        for thread in threads:
            thread.start()
            assert entered.acquire(timeout=30)
        status, _, headers = once(server, body)
        assert (status, headers["Retry-After"]) == (503, "1")
        go.set()
        for thread in threads:
            thread.join(30)
        assert answers == [200, 200]
        assert server.most_at_once == 2
        assert once(server, BODY + b" " * 4000)[0] == 200  # larger than all together: alone
