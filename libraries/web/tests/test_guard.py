"""Keys in another header, and bodies of another type."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlhf_web import Bodies, Guard, ServerLimits

PROTO = "application/x-protobuf"


def post(app, headers, body):
    """Status and body of the response to a POST."""
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    received = []

    async def receive():
        return sent.pop(0) if sent else {"type": "http.disconnect"}

    async def send(message):
        received.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": encoded,
        "query_string": b"",
        "http_version": "1.1",
    }
    asyncio.run(app(scope, receive, send))
    return received[0]["status"], b"".join(each.get("body", b"") for each in received[1:])


def make_app():
    bodies = Bodies(ServerLimits())

    async def answer(request: Request) -> Response:
        async with bodies.held(request, media_type=PROTO) as content:
            return Response(content)

    return Guard(
        [Route("/", answer, methods=["POST"])],
        refusal=lambda _, refused: Response(refused.code, refused.status),
        knows=lambda key: key == "secret",
        key_of=lambda headers: headers.get("x-api-key", ""),
    )


def test_a_key_in_another_header_and_a_body_of_another_type():
    headers = {"x-api-key": "secret", "content-type": PROTO, "content-length": "3"}
    assert post(make_app(), headers, b"\x00\x01\x02") == (200, b"\x00\x01\x02")


def test_other_keys_and_types_are_refused():
    headers = {"authorization": "Bearer secret", "content-type": PROTO, "content-length": "1"}
    assert post(make_app(), headers, b"x") == (401, b"invalid_api_key")
    headers = {"x-api-key": "secret", "content-type": "application/json", "content-length": "1"}
    assert post(make_app(), headers, b"x") == (415, b"unsupported_media_type")
