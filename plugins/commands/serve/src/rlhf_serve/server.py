"""The server, which passes each request to the owner of the request's key."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rlhf_episodes import Answer, BatchKeyOwner, Call, CallRefused, EndpointServer, FindKey, KeyOwner
from rlhf_web import Bodies, Guard, ServerLimits, WebServer, bearer_key

from .protocol import BODIES, HEALTH_PATH, MODELS_PATH, POLICY, Body, read
from .responses import answer_body, answer_events, encode, error_body, models_body

logger = logging.getLogger("rlhf.serve")

JSON = "application/json"
T = TypeVar("T")


def make_app(find_key: FindKey, limits: ServerLimits, model: str | None = None) -> Guard:
    """Return an ASGI application in which the owners of keys answer calls.

    Args:
        find_key: returns the owner of a key, None for an unknown key.
        limits: limits on bodies.
        model: the only model name that requests may use. None accepts any name.
    """
    # A template may render ids, and episodes must be reproducible: in a run, ids depend only on the turn.
    id_prefix = "" if model is None else f"{secrets.token_hex(8)}-"
    bodies = Bodies(limits)

    async def answer(request: Request) -> Response:
        owner = find_key(bearer_key(request.headers))
        assert owner is not None, "the guard has checked the key"
        async with bodies.held(request) as content:
            kind, is_served = BODIES[request.url.path], isinstance(owner, BatchKeyOwner)
            body = _with_model_name(read(content, kind, with_extras=is_served), model)
        answers = await _while_connected(request, _answer_all(owner, body.calls()))
        reply_id = f"{id_prefix}{answers[0].turn}"
        if not body.stream:
            return Response(answer_body(body, answers, reply_id), media_type=JSON)
        events = b"".join(answer_events(body, answers, reply_id))
        return Response(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    return Guard(
        [
            Route(HEALTH_PATH, _constant_response(encode({"status": "ok"}))),
            Route(MODELS_PATH, _constant_response(models_body(model or POLICY))),
            *(Route(path, answer, methods=["POST"]) for path in BODIES),
        ],
        refusal=lambda refused: Response(error_body(refused), refused.status, media_type=JSON),
        knows=lambda key: find_key(key) is not None,
        needs_key=lambda path: path != HEALTH_PATH,
    )


def _with_model_name(body: Body, model: str | None) -> Body:
    """Set the model's name for the response. Raises `CallRefused` if the request names another model."""
    if model is not None and body.model not in (None, model):
        message = f"the model {body.model!r} does not exist: this server has {model!r}"
        raise CallRefused(404, "model_not_found", message)
    return body.model_copy(update={"model": body.model or model or POLICY})


def _constant_response(body: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(body, media_type=JSON)

    return answer


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. If the client disconnects, cancel it and raise `ClientDisconnect`."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})
        if not working.cancelled():
            working.exception()  # marks it as retrieved, so that asyncio does not log it


async def _answer_all(owner: KeyOwner, calls: Sequence[Call]) -> list[Answer]:
    """Return all answers in the order of the calls. Every error of the owner becomes `CallRefused`."""
    try:
        return await (owner.answer_all(calls) if isinstance(owner, BatchKeyOwner) else _gather_answers(owner, calls))
    except CallRefused:
        raise
    except Exception as error:
        logger.exception("a call failed")
        raise CallRefused(500, "internal_error", f"the call failed ({type(error).__name__})") from error


async def _gather_answers(owner: KeyOwner, calls: Sequence[Call]) -> list[Answer]:
    """Return one answer per call. If one call is refused, the others are canceled."""
    tasks = [asyncio.ensure_future(owner.answer(call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class ModelServer(WebServer):
    """An `EndpointServer` on the running event loop."""

    @property
    def base_url(self) -> str:
        """Base address for OpenAI's clients."""
        return f"{self.address}/v1"


async def start(
    find_key: FindKey, *, host: str, port: int, limits: ServerLimits, model: str | None = None
) -> EndpointServer:
    """Start the server. This is the entry point `openai` of `rlhf.endpoints` (a `StartServer`).

    Args:
        find_key: returns the owner of a key, None for an unknown key.
        host: address to listen at.
        port: port to listen at. 0 selects a free port.
        limits: limits on connections, bodies and time.
        model: the only model name that requests may use. None accepts any name.
    """
    server = ModelServer(make_app(find_key, limits, model), limits)
    await server.listen(host, port, where="the endpoint")
    return server
