"""The server: asks every request for its key, and has the key's owner answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rlhf_episodes import Answer, Call, CallRefused, EndpointServer, FindKey, KeyOwner
from rlhf_web import Bodies, Guard, ServerLimits, WebServer, bearer_key

from .protocol import (
    BODIES,
    HEALTH_PATH,
    MODELS_PATH,
    POLICY,
    Body,
    answer_body,
    answer_events,
    encode,
    error_body,
    models_body,
    read,
)

logger = logging.getLogger("rlhf.serve")

JSON = "application/json"
T = TypeVar("T")


def make_app(find_key: FindKey, limits: ServerLimits, model: str | None = None) -> Guard:
    """Answers calls of the owners of keys. model: the only name that requests may give; without one any will do."""
    # A template may render ids, and episodes have to repeat: in a run they are made of the turn alone.
    ids_begin = "" if model is None else f"{secrets.token_hex(8)}-"
    bodies = Bodies(limits)

    async def answer(request: Request) -> Response:
        owner = find_key(bearer_key(request.headers))
        assert owner is not None, "the guard let it pass"
        async with bodies.held(request) as body:
            asked = _named(read(body, BODIES[request.url.path]), model)
        answers = await _while_client_stays(request, _answers_of(owner, asked.calls()))
        reply_id = f"{ids_begin}{answers[0].turn}"
        if not asked.stream:
            return Response(answer_body(asked, answers, reply_id), media_type=JSON)
        events = b"".join(answer_events(asked, answers, reply_id))
        return Response(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    return Guard(
        [
            Route(HEALTH_PATH, _json(encode({"status": "ok"}))),
            Route(MODELS_PATH, _json(models_body(model or POLICY))),
            *(Route(path, answer, methods=["POST"]) for path in BODIES),
        ],
        refusal=lambda refused: Response(error_body(refused), refused.status, media_type=JSON),
        knows=lambda key: find_key(key) is not None,
        needs_key=lambda path: path != HEALTH_PATH,
    )


def _named(asked: Body, model: str | None) -> Body:
    """With the model's name in the answer. Raises `CallRefused` where another was asked for."""
    if model is not None and asked.model not in (None, model):
        message = f"the model {asked.model!r} does not exist: this server has {model!r}"
        raise CallRefused(404, "model_not_found", message)
    return asked.model_copy(update={"model": asked.model or model or POLICY})


def _json(body: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(body, media_type=JSON)

    return answer


async def _while_client_stays(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; it is cancelled where the client leaves, and that raises `ClientDisconnect`."""
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
            working.exception()  # nobody else will ask for it


async def _answers_of(owner: KeyOwner, calls: Sequence[Call]) -> list[Answer]:
    """All answers, in the order of the calls. Where one is refused, the others are cancelled."""
    tasks = [asyncio.ensure_future(_answer_of(owner, call)) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _answer_of(owner: KeyOwner, call: Call) -> Answer:
    """The owner's answer. Every error of the owner becomes `CallRefused`."""
    try:
        return await owner.answer(call)
    except CallRefused:
        raise
    except Exception as error:
        logger.exception("a call failed")
        raise CallRefused(500, "internal_error", f"it could not be answered ({type(error).__name__})") from error


class Server(WebServer):
    """Serves the owners of keys on the running event loop (`EndpointServer`)."""

    @property
    def base_url(self) -> str:
        """See `EndpointServer`."""
        return f"{self.address}/v1"


async def start(
    find_key: FindKey, *, host: str, port: int, limits: ServerLimits, model: str | None = None
) -> EndpointServer:
    """Start the server; the entry point `openai` of `rlhf.endpoints` (`StartServer`).

    model: the only name that requests may give; without one any will do.
    """
    server = Server(make_app(find_key, limits, model), limits)
    await server.listen(host, port, where="the endpoint")
    return server
