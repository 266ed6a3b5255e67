"""The server, which passes each request to the owner of the request's key."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rlhf_episodes import Answer, BatchKeyOwner, Call, CallRefused, EndpointServer, FindKey, KeyOwner
from rlhf_web import Bodies, Guard, Refused, ServerLimits, WebServer, bearer_key

from .dialects import DIALECTS, dialect_of
from .stored import StoredConversations
from .wire import AnswerRequest, CountRequest, R, WireRequest, encode, read

logger = logging.getLogger("rlhf.serve")

JSON = "application/json"
HEALTH_PATH, MODELS_PATH = "/health", "/v1/models"
POLICY = "policy"
"""Name of the model in a run. Calls may use any name."""
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

    def key_of(headers: Headers) -> str:
        keys = api_keys(headers)
        return next((key for key in keys if find_key(key) is not None), keys[0])

    conversations: WeakKeyDictionary[KeyOwner, StoredConversations] = WeakKeyDictionary()

    def handler(kind: type[WireRequest]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            owner = find_key(key_of(request.headers))
            assert owner is not None, "the guard has checked the key"
            async with bodies.held(request) as content:
                body = _with_model_name(read(content, kind, with_extras=isinstance(owner, BatchKeyOwner)), model)
            stored = conversations.setdefault(owner, StoredConversations())
            calls = body.calls(stored)
            if isinstance(body, CountRequest):
                num_tokens = await _while_connected(request, _refuse_errors(owner.count_tokens(calls[0])))
                return Response(body.count_body(num_tokens), media_type=JSON)
            assert isinstance(body, AnswerRequest)
            answers = await _while_connected(request, _refuse_errors(_answer_all(owner, calls)))
            reply_id = f"{id_prefix}{answers[0].turn}"
            body.keep(stored, calls, answers, reply_id)
            if not body.stream:
                return Response(body.answer_body(answers, reply_id), media_type=JSON)
            events = b"".join(body.answer_events(answers, reply_id))
            return Response(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

        return handle

    async def list_models(request: Request) -> Response:
        return Response(dialect_of(request.url.path, request.headers).models_body(model or POLICY), media_type=JSON)

    async def health(request: Request) -> Response:
        return Response(encode({"status": "ok"}), media_type=JSON)

    kinds = {path: kind for dialect in DIALECTS for path, kind in dialect.requests.items()}
    return Guard(
        [
            Route(HEALTH_PATH, health),
            Route(MODELS_PATH, list_models),
            *(Route(path, handler(kind), methods=["POST"]) for path, kind in kinds.items()),
        ],
        refusal=_refusal,
        knows=lambda key: find_key(key) is not None,
        key_of=key_of,
        needs_key=lambda path: path != HEALTH_PATH,
    )


def api_keys(headers: Headers) -> tuple[str, str]:
    """Return the keys of a request, as `X-Api-Key` and as `Authorization`, each of which may be empty.

    Anthropic's clients send either, or both if one of them is in an environment variable.

    Example:
        >>> api_keys(Headers({"X-Api-Key": "secret"}))
        ('secret', '')
    """
    return headers.get("x-api-key", "").strip(), bearer_key(headers)


def _refusal(request: Request, refused: Refused) -> Response:
    """Return an error in the form of the request's API."""
    dialect = dialect_of(request.url.path, request.headers)
    return Response(dialect.error_body(refused), refused.status, media_type=JSON)


def _with_model_name(body: R, model: str | None) -> R:
    """Set the model's name for the response. Raises `CallRefused` if the request names another model."""
    if model is not None and body.model not in (None, model):
        message = f"the model {body.model!r} does not exist: this server has {model!r}"
        raise CallRefused(404, "model_not_found", message)
    return body.model_copy(update={"model": body.model or model or POLICY})


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
    """Return all answers in the order of the calls."""
    return await (owner.answer_all(calls) if isinstance(owner, BatchKeyOwner) else _gather_answers(owner, calls))


async def _refuse_errors(work: Awaitable[T]) -> T:
    """Await work of an owner. Every error of it becomes `CallRefused`."""
    try:
        return await work
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
