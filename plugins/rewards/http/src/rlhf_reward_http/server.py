"""A server of one reward: bounded in connections, requests in flight and body size, and stopped in good order."""

from __future__ import annotations

import hmac
import json
import logging
from collections import Counter
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
    VERSION,
    ProtocolError,
    decode_request,
    encode_error,
    encode_response,
)

logger = logging.getLogger("rlhf.serve_reward")

Score = Callable[[Sequence[Rollout]], Awaitable[Sequence[float | None]]]


class RewardApp:
    """Answers requests of the protocol by `score`.

    A body is parsed to Python objects, which take up to about 25 times its bytes, and held until it is scored.
    """

    def __init__(
        self, score: Score, limits: ServerLimits, *, token: str | None = None, host: str | None = None
    ) -> None:
        """host: the address it listens at, as the guard takes it; needed where no token is asked for."""
        self._score = score
        self._bodies = Bodies(limits)
        self.counts: Counter[str] = Counter()
        """`requests` and `samples` that were scored, `failed` ones, `refused` ones (told to come again later), and
        `most_in_flight`."""
        self.guarded = Guard(
            [Route(SCORE_PATH, self._answer, methods=["POST"]), Route(HEALTH_PATH, self._health)],
            refusal=self._refusal,
            knows=None if token is None else lambda given: hmac.compare_digest(given.encode(), token.encode()),
            host=host,
        )

    async def _answer(self, request: Request) -> Response:
        async with self._bodies.held(request) as body:
            self.counts["most_in_flight"] = max(self.counts["most_in_flight"], self._bodies.num_held)
            try:
                rollouts = decode_request(body)
                scores = await self._score(rollouts)
            except ProtocolError as error:
                raise Refused(400, "invalid_request", str(error)) from None
            except RewardError as error:
                logger.warning("%s", error)
                self.counts["failed"] += 1
                raise Refused(500, "reward_failed", f"{error.where}: {error.message}") from None
        self.counts.update(requests=1, samples=len(rollouts))
        return Response(encode_response(scores), media_type=CONTENT_TYPE)

    async def _health(self, request: Request) -> Response:
        said = {"protocol": VERSION, "status": "ok", "in_flight": self._bodies.num_held}
        return Response(json.dumps(said), media_type=CONTENT_TYPE)

    def _refusal(self, refused: Refused) -> Response:
        self.counts["refused"] += refused.status == 503
        return Response(encode_error(str(refused)), refused.status, media_type=CONTENT_TYPE)
