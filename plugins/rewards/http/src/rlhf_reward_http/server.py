"""A server of one reward, with limits on connections, requests in flight and body size, and a graceful stop."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlhf_core.errors import RewardError
from rlhf_core.types import Rollout
from rlhf_web import Bodies, Guard, Refused, ServerLimits

from .protocol import (
    CONTENT_TYPE,
    HEALTH_PATH,
    SCORE_PATH,
    ProtocolError,
    decode_request,
    encode_error,
    encode_health,
    encode_response,
)

logger = logging.getLogger("rlhf.serve_reward")

Score = Callable[[Sequence[Rollout]], Awaitable[Sequence[float | None]]]


def make_app(score: Score, limits: ServerLimits, *, token: str | None = None, host: str | None = None) -> Guard:
    """Return an ASGI application that answers requests of the protocol.

    A body is parsed into Python objects, which take up to about 25 times its size until they are scored.

    Args:
        score: scores samples. None is a missing score.
        limits: limits on bodies.
        token: key that requests must send. None disables the check.
        host: address that the server listens at, as for `Guard`. Required if `token` is None.
    """
    bodies = Bodies(limits)

    async def answer(request: Request) -> Response:
        async with bodies.held(request) as body:
            try:
                scores = await score(decode_request(body))
            except ProtocolError as error:
                raise Refused(400, "invalid_request", str(error)) from None
            except RewardError as error:
                logger.warning("%s", error)
                raise Refused(500, "reward_failed", f"{error.where}: {error.message}") from None
        return Response(encode_response(scores), media_type=CONTENT_TYPE)

    async def health(request: Request) -> Response:
        return Response(encode_health(bodies.num_held), media_type=CONTENT_TYPE)

    return Guard(
        [Route(SCORE_PATH, answer, methods=["POST"]), Route(HEALTH_PATH, health)],
        refusal=lambda _, refused: Response(encode_error(str(refused)), refused.status, media_type=CONTENT_TYPE),
        knows=None if token is None else lambda key: hmac.compare_digest(key.encode(), token.encode()),
        host=host,
    )
