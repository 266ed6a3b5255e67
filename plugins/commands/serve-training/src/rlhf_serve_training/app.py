"""The routes of the API. Bodies are read within limits, and every error has the API's form."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tinker import types

from rlhf_web import Bodies, Guard, Refused, ServerLimits

from .lists import Lists
from .requests import ModelFacts, read
from .service import Service
from .store import PROTO_RESULT, encoded
from .wire import InvalidRequest

JSON, PROTO = "application/json", "application/x-protobuf"
_POLL_SECONDS = 25.0
"""Maximum time for which a client waits for a result. The SDK gives up after 45 s."""
_MESSAGE_BYTES = 64 * 1024
"""Maximum size of a request without data. The journal keeps names and metadata for as long as it exists."""
MAX_CONNECTIONS = 1024
_SPARE_CONNECTIONS = 64
"""Connections of all tenants together beyond their shares: idle ones, and those without a key."""
_TRAINING = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
_NOT_OFFERED = {
    "/auth/token": "JWT authentication",
    "/create_custom_loss": "custom losses on the server",
    "/retrieve_futures": "the queue of finished samples",
    "/copy_weights": "projects",
    "/audit": "an audit log",
    "/billing/{rest:path}": "billing",
    "/sessions/search": "search",
    "/sessions/{id}/project": "projects",
    "/sessions/{id}/trace_export": "traces",
    "/training_runs/{id}/checkpoints/{kind}/{name}/publish": "publishing of checkpoints",
}
Handler = Callable[[Request, str], Awaitable[Response]]


def request_key(headers: Headers) -> str:
    """Return the key of a request, as the SDK sends it, or an empty text."""
    return headers.get("x-api-key", "")


class Tenants:
    """Keys and the tenants that they belong to."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """Create the table. `keys`: name of a tenant -> its key."""
        self._keys = keys

    @property
    def count(self) -> int:
        """Number of tenants."""
        return len(self._keys)

    def find(self, key: str) -> str | None:
        """Return the tenant of a key, or None. Takes the same time for all wrong keys."""
        found = None
        for name, own in self._keys.items():
            if secrets.compare_digest(own.encode(), key.encode()):
                found = name
        return found


class Shares:
    """Requests that each tenant has open at the same time, so that one's long polls leave connections to the others."""

    def __init__(self, limit: int) -> None:
        """Create the table. `limit`: maximum number of open requests of a tenant."""
        self._limit = limit
        self._open: Counter[str] = Counter()

    @contextmanager
    def one_of(self, tenant: str) -> Iterator[None]:
        """Context of a request of a tenant. Raises `Refused`, with a status that the SDK retries, at the limit."""
        if self._open[tenant] >= self._limit:
            raise Refused(429, "too_many_open", f"{self._limit} requests are open, wait for some of them")
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1


def make_app(service: Service, facts: ModelFacts, tenants: Tenants, *, host: str, tokenizer: str) -> Guard:
    """Return the ASGI application.

    Args:
        service: the service.
        facts: facts of the base model.
        tenants: the keys.
        host: address that the server listens at.
        tokenizer: name or folder that a client loads the tokenizer from.
    """
    limits = server_limits(service)
    bodies = Bodies(limits)
    shares = Shares((limits.max_connections - _SPARE_CONNECTIONS) // tenants.count)
    lists = Lists(service, facts, tokenizer)
    api = _Api(service, bodies, lists)

    def route(path: str, handler: Handler, method: str = "POST") -> Route:
        async def answer(request: Request) -> Response:
            tenant = tenants.find(request_key(request.headers))
            assert tenant is not None, "the guard has checked the key"
            if service.failed is not None:
                raise Refused(503, "failed", "the service has failed, see its log")
            try:
                with shares.one_of(tenant):
                    return await handler(request, tenant)
            except InvalidRequest as error:
                raise Refused(400, "invalid_request", str(error)) from None

        return Route(f"/api/v1{path}", answer, methods=[method])

    routes = _routes(route, api, lists)
    return Guard(
        routes,
        refusal=lambda _, refused: _refusal(refused),
        knows=lambda key: tenants.find(key) is not None,
        needs_key=lambda path: path != "/api/v1/healthz" and not path.startswith("/files/"),
        key_of=request_key,
        host=host,
        headers={"cache-control": "no-store"},
    )


def _routes(route: Callable[..., Route], api: _Api, lists: Lists) -> list[Route]:
    """All paths. `route` makes one whose handler receives the tenant."""

    async def health(request: Request) -> Response:
        return answer_json({"status": "ok"})

    return [
        Route("/api/v1/healthz", health, methods=["GET"]),
        *(route(path, _not_offered(what), method) for path, what in _NOT_OFFERED.items() for method in ("GET", "POST")),
        *(route(f"/{kind}", api.training(kind)) for kind in _TRAINING),
        route("/forward_backward", api.forward_backward),
        route("/client/config", api.client_config),
        route("/client/dynamic_config", api.dynamic_config),
        route("/create_session", api.create_session),
        route("/session_heartbeat", api.heartbeat),
        route("/sessions/{id}/finish", api.finish),
        route("/create_model", api.create_model),
        route("/unload_model", api.unload),
        route("/load_weights", api.load_weights),
        route("/create_sampling_session", api.create_sampler),
        route("/join_sampling_session", api.join_sampler),
        route("/asample", api.sample),
        route("/retrieve_future", api.retrieve),
        route("/cancel_future", api.cancel),
        route("/telemetry", api.telemetry),
        route("/get_info", api.info),
        route("/weights_info", api.weights_info),
        route("/get_server_capabilities", lists.capabilities, "GET"),
        route("/sessions", lists.sessions, "GET"),
        route("/sessions/{id}", lists.session, "GET"),
        route("/samplers/{id}", lists.sampler, "GET"),
        route("/training_runs", lists.runs, "GET"),
        route("/training_runs/{id}", lists.run, "GET"),
        route("/training_runs/{id}/checkpoints", lists.run_checkpoints, "GET"),
        route("/training_runs/{id}/checkpoints/{kind}/{name}", lists.delete, "DELETE"),
        route("/training_runs/{id}/checkpoints/{kind}/{name}/ttl", api.set_ttl, "PUT"),
        route("/training_runs/{id}/checkpoints/{kind}/{name}/external_weights_urls", lists.urls, "GET"),
        route("/checkpoints", lists.checkpoints, "GET"),
        Route("/files/{token}/{file}", lists.file, methods=["GET"]),
    ]


def server_limits(service: Service) -> ServerLimits:
    """Return the limits of the web server."""
    size = service.limits.body_bytes
    return ServerLimits(
        max_connections=MAX_CONNECTIONS, max_body_bytes=size, max_bytes_in_flight=4 * size, wait_seconds=60.0
    )


def answer_json(value: Mapping[str, Any], status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(encoded(value), status, media_type=JSON)


def _refusal(refused: Refused) -> Response:
    category = "server" if refused.status >= 500 else "user"
    response = answer_json({"error": str(refused), "category": category, "code": refused.code}, refused.status)
    if refused.status in (429, 503):
        response.headers["retry-after"] = "1"
    return response


def _not_offered(what: str) -> Handler:
    async def answer(request: Request, tenant: str) -> Response:
        raise Refused(404, "not_offered", f"this service does not offer {what}")

    return answer


class _Api:
    """Handlers of requests with bodies."""

    def __init__(self, service: Service, bodies: Bodies, lists: Lists) -> None:
        self._service, self._bodies, self._lists = service, bodies, lists

    async def _body(self, request: Request, media_type: str = JSON) -> bytes:
        """The body of a request with data, which `limits.body_bytes` bounds."""
        async with self._bodies.held(request, media_type=media_type) as content:
            return content

    async def _message(self, request: Request) -> bytes:
        """The body of a request without data."""
        content = await self._body(request)
        if len(content) > _MESSAGE_BYTES:
            raise Refused(413, "request_too_large", f"a request without data has at most {_MESSAGE_BYTES} bytes")
        return content

    def training(self, kind: str) -> Handler:
        """Return the handler of a request in the order of a model's requests."""

        async def answer(request: Request, tenant: str) -> Response:
            # A refusal would leave a gap in the order, so limits are checked when it is the request's turn.
            return _future(self._service.train(tenant, kind, await self._body(request)))

        return answer

    async def forward_backward(self, request: Request, tenant: str) -> Response:
        return _future(self._service.train(tenant, "forward_backward", await self._body(request, PROTO)))

    async def client_config(self, request: Request, tenant: str) -> Response:
        await self._message(request)
        limits = self._service.limits
        config = types.ClientConfigResponse(
            use_pyqwest_transport=False,
            fwdbwd_max_chunk_len=limits.data_per_request,
            fwdbwd_max_chunk_bytes_count=limits.chunk_bytes,
            sample_join_sampling_session=True,
        )
        return answer_json(config.model_dump())

    async def dynamic_config(self, request: Request, tenant: str) -> Response:
        await self._message(request)
        return answer_json(types.ClientDynamicConfigResponse(sample_cancel_enabled=True).model_dump())

    async def create_session(self, request: Request, tenant: str) -> Response:
        message = read(types.CreateSessionRequest, await self._message(request))
        key = request.headers.get("x-idempotency-key") or secrets.token_hex(16)
        session_id = self._service.create_session(tenant, message, key)
        return answer_json(
            types.CreateSessionResponse(
                session_id=session_id,
                info_message="this server trains no adapter on the unembedding layer (train_unembed has no effect)",
            ).model_dump()
        )

    async def heartbeat(self, request: Request, tenant: str) -> Response:
        message = read(types.SessionHeartbeatRequest, await self._message(request))
        self._service.seen(tenant, message.session_id)
        return answer_json(types.SessionHeartbeatResponse().model_dump())

    async def finish(self, request: Request, tenant: str) -> Response:
        await self._message(request)
        self._service.finish(tenant, request.path_params["id"], {"finished": True})
        return answer_json({})

    async def create_model(self, request: Request, tenant: str) -> Response:
        body = await self._message(request)
        return _future(self._service.create_model(tenant, read(types.CreateModelRequest, body), body))

    async def unload(self, request: Request, tenant: str) -> Response:
        body = await self._message(request)
        return _future(self._service.unload(tenant, read(types.UnloadModelRequest, body), body))

    async def load_weights(self, request: Request, tenant: str) -> Response:
        body = await self._message(request)
        return _future(self._service.load_weights(tenant, read(types.LoadWeightsRequest, body), body))

    async def create_sampler(self, request: Request, tenant: str) -> Response:
        message = read(types.CreateSamplingSessionRequest, await self._message(request))
        sampler_id = self._service.create_sampler(tenant, message)
        return answer_json(types.CreateSamplingSessionResponse(sampling_session_id=sampler_id).model_dump())

    async def join_sampler(self, request: Request, tenant: str) -> Response:
        message = read(types.JoinSamplingSessionRequest, await self._message(request))
        self._lists.sampler_of(tenant, message.sampling_session_id)
        counter = self._service.store.count("clients of samplers")
        return answer_json(types.JoinSamplingSessionResponse(client_counter=counter).model_dump())

    async def sample(self, request: Request, tenant: str) -> Response:
        request_id, sequence_ids = self._service.sample(tenant, await self._body(request))
        return answer_json({"request_id": request_id, "sample_sequence_ids": sequence_ids})

    async def retrieve(self, request: Request, tenant: str) -> Response:
        message = read(types.FutureRetrieveRequest, await self._message(request))
        found = await self._service.result(tenant, message.request_id, _POLL_SECONDS)
        if found is None:
            waiting = {"type": "try_again", "request_id": message.request_id, "queue_state": "active"}
            return answer_json(waiting, 408)
        kind, content = found
        return Response(content, media_type=PROTO if kind == PROTO_RESULT else JSON)

    async def cancel(self, request: Request, tenant: str) -> Response:
        message = read(types.FutureRetrieveRequest, await self._message(request))
        self._service.cancel(tenant, message.request_id)
        return answer_json({})

    async def telemetry(self, request: Request, tenant: str) -> Response:
        await self._body(request)  # nothing of it is stored
        return answer_json({"status": "accepted"})

    async def info(self, request: Request, tenant: str) -> Response:
        message = read(types.GetInfoRequest, await self._message(request))
        return answer_json(self._lists.info(tenant, message.model_id))

    async def weights_info(self, request: Request, tenant: str) -> Response:
        body = await self._message(request)
        return answer_json(self._lists.weights_info(tenant, body))

    async def set_ttl(self, request: Request, tenant: str) -> Response:
        body = await self._message(request)
        return self._lists.set_ttl(request, tenant, body)


def _future(request_id: str) -> Response:
    return answer_json({"request_id": request_id})
