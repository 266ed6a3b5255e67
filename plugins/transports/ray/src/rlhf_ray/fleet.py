"""`Fleet`: manages the makers of a running job: replaces lost makers, and adds or removes makers on request.

`rlhf ray scale` sends the request, by a file in the run folder. An added maker starts once Ray has resources for it. A
removed maker is stopped immediately, and other makers generate the same samples for its prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import ray

from rlhf_core.errors import EngineLostError, RlhfError
from rlhf_core.util import printable

from .actors import Actors, MakerHandle, resources
from .calls import ActorLostError, ask, error_of, explain, is_lost
from .driver_files import DriverRequest, ScaleAnswer
from .messages import Overview

logger = logging.getLogger("rlhf.ray")


class Fleet:
    """Manages the makers of a running job."""

    def __init__(self, actors: Actors) -> None:
        self._actors = actors
        self.answer: ScaleAnswer | None = None
        """Answer to the newest request."""
        self._request: DriverRequest | None = None
        """Request in progress."""
        self._deadline = 0.0
        self._registered: set[str] = set()
        """Names of makers that have ever been registered."""

    def step(self, view: Overview) -> None:
        """Check all makers once. Raises an error that ends the run."""
        names = {row.name for row in view.makers}
        self._registered |= {maker.name for maker in self._actors.makers if maker.id in names}
        self._replace_lost(view)
        if self._request is not None:
            self._check_request(self._request)

    def scale(self, request: DriverRequest) -> None:
        """Start to process a request, which `step` continues."""
        makers = self._actors.makers
        logger.warning("%d makers requested, the run has %d", request.makers, len(makers))
        self._request, self._deadline = request, time.monotonic() + request.timeout_seconds
        more = request.makers - len(makers)
        if not self._actors.num_makers:
            self._answer("this run has no makers, since it generates nothing")
        elif more > 0 and self._actors.lacks_room(more):
            self._answer(f"resources for {more} more makers are missing: {self._describe_room(more)}")
        else:
            for _ in range(more):
                self._actors.add_maker(is_added=True)
            for maker in makers[: request.makers - 1 : -1]:  # newest first
                lost = self._actors.remove(maker)
                logger.warning("%s was stopped, %d of its prompts will be generated again", maker.name, lost)
            ask(self._actors.coordinator, "scale", len(makers))

    def _check_request(self, request: DriverRequest) -> None:
        late = [maker for maker in self._actors.makers if maker.is_added and maker.name not in self._registered]
        if not late:
            logger.warning("the run has %d makers now", len(self._actors.makers))
            self._answer("")
        elif time.monotonic() >= self._deadline:
            room = self._describe_room(len(late))
            self._give_up(late, f"did not start within {request.timeout_seconds:g} s: {room}")

    def _replace_lost(self, view: Overview) -> None:
        """Replace makers that are lost or stuck. Raises the error of a maker that failed."""
        works = [maker.work for maker in self._actors.makers]
        ended = set(ray.wait(works, num_returns=len(works), timeout=0)[0]) if works else set()
        for maker in list(self._actors.makers):
            if maker.work in ended:
                error = error_of(maker.work)
                if error is None:
                    raise RlhfError("its loop ended before the run did", where=maker.name)
                explained = explain(maker.name, error)
                if maker.is_added and maker.name not in self._registered:
                    self._give_up([maker], f"did not start: {explained.message}")
                elif not is_lost(error) and not isinstance(explained, EngineLostError):
                    raise explained from None
                else:  # a maker that lost the process of its engine is replaced like one that died
                    counts = not getattr(error, "preempted", False)
                    self._replace(maker, str(explained.message), counts=counts)
            elif maker.id in view.stuck:
                self._replace(maker, f"it is presumed dead: it {view.stuck[maker.id]}")

    def _replace(self, maker: MakerHandle, reason: str, *, counts: bool = True) -> None:
        """Restart a maker. `counts`: whether this counts toward `max_restarts`, False if its node was preempted."""
        if counts and maker.failures >= self._actors.config.max_restarts:
            raise ActorLostError(
                f"already restarted {maker.failures} times, and now: {reason}",
                where=maker.name,
                hint="the log has the reasons, and transport.max_restarts limits the restarts",
            )
        logger.warning("%s: %s", maker.name, reason)
        maker.failures += counts
        started = time.monotonic()
        self._actors.restart(maker)
        logger.info("%s replaced in %.2f s", maker.name, time.monotonic() - started)

    def _give_up(self, makers: Sequence[MakerHandle], why: str) -> None:
        """Remove added makers that did not start. The run continues with the others."""
        for maker in makers:
            self._actors.remove(maker)
        left = len(self._actors.makers)
        ask(self._actors.coordinator, "scale", left)
        names = ", ".join(maker.name for maker in makers)
        self._answer(f"{names} {why}. The run continues with {left} makers")

    def _describe_room(self, num_makers: int) -> str:
        config = self._actors.config
        return resources(num_makers * config.maker_cpus, num_makers * config.maker_gpus)

    def _answer(self, problem: str) -> None:
        """End the current request for a number of makers, and store its result in `answer`.

        An empty `problem` is success. Any other is the reason of the failure, which is also logged.
        """
        if problem:
            logger.error("%s", problem)
        if self._request is not None:
            self.answer = ScaleAnswer(id=self._request.id, problem=printable(problem))
        self._request = None
