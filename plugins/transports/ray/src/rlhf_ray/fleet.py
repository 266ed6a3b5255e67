"""`Fleet`: keeps the makers of a running job. It replaces those that are lost, and adds or ends some when asked.

`rlhf ray scale` asks, by a file in the run folder. One more starts as soon as Ray has room for it. One less is ended at
once: its prompts are made again, by others, and come out the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import ray

from rlhf_core.errors import EngineLostError, RlhfError
from rlhf_core.util import printable

from .actors import Actors, Maker, room
from .calls import ActorLostError, ask, error_of, explain, is_lost
from .driver_files import Request, ScaleAnswer
from .messages import Overview

logger = logging.getLogger("rlhf.ray")


class Fleet:
    """Keeps the makers of a running job."""

    def __init__(self, actors: Actors) -> None:
        self._actors = actors
        self.answer: ScaleAnswer | None = None
        """To the newest request."""
        self._request: Request | None = None
        """That is not done."""
        self._deadline = 0.0
        self._joined: set[str] = set()
        """Names of makers that have been registered once."""

    def step(self, view: Overview) -> None:
        """Look once at all of them. Raises what ends the run."""
        there = {row.name for row in view.makers}
        self._joined |= {maker.name for maker in self._actors.makers if maker.id in there}
        self._watch(view)
        if self._request is not None:
            self._go_on(self._request)

    def scale(self, request: Request) -> None:
        """Begin to do what is asked for; `step` goes on with it."""
        makers = self._actors.makers
        logger.warning("asked for %d makers; there are %d", request.makers, len(makers))
        self._request, self._deadline = request, time.monotonic() + request.timeout_seconds
        more = request.makers - len(makers)
        if not self._actors.num_makers:
            self._answer("this run has no makers: nothing is generated")
        elif more > 0 and self._actors.has_no_room(more):
            self._answer(f"there is no room for {more} more makers: {self._room(more)}")
        else:
            for _ in range(more):
                self._actors.add_maker(is_added=True)
            for maker in makers[: request.makers - 1 : -1]:  # the newest first
                lost = self._actors.remove(maker)
                logger.warning("%s is ended; %d of its prompts will be made again", maker.name, lost)
            ask(self._actors.coordinator, "scale", len(makers))

    def _go_on(self, request: Request) -> None:
        late = [maker for maker in self._actors.makers if maker.is_added and maker.name not in self._joined]
        if not late:
            logger.warning("the run has %d makers now", len(self._actors.makers))
            self._answer("")
        elif time.monotonic() >= self._deadline:
            told = self._room(len(late))
            self._give_up(late, f"did not start within {request.timeout_seconds:g} s: {told}")

    def _watch(self, view: Overview) -> None:
        """Replace the makers that are lost or stuck."""
        works = [maker.work for maker in self._actors.makers]
        ended = set(ray.wait(works, num_returns=len(works), timeout=0)[0]) if works else set()
        for maker in list(self._actors.makers):
            if maker.work in ended:
                error = error_of(maker.work)
                if error is None:
                    raise RlhfError("its loop ended before the run did", where=maker.name)
                told = explain(maker.name, error)
                if maker.is_added and maker.name not in self._joined:
                    self._give_up([maker], f"does not start: {told.message}")
                elif not is_lost(error) and not isinstance(told, EngineLostError):
                    raise told from None
                else:  # without the process that its engine generates in it is no maker, and is replaced as one
                    counts = not getattr(error, "preempted", False)
                    self._replace(maker, str(told.message), counts=counts)
            elif maker.id in view.stuck:
                self._replace(maker, f"it is held for dead: it {view.stuck[maker.id]}")

    def _replace(self, maker: Maker, reason: str, *, counts: bool = True) -> None:
        """counts: towards `max_restarts`; not where its node was taken away."""
        if counts and maker.failures >= self._actors.config.max_restarts:
            raise ActorLostError(
                f"{reason}; it was started anew {maker.failures} times already",
                where=maker.name,
                hint="see the log for why; transport.max_restarts bounds the attempts",
            )
        logger.warning("%s: %s", maker.name, reason)
        maker.failures += counts
        started = time.monotonic()
        self._actors.restart(maker)
        logger.info("%s replaced in %.2f s", maker.name, time.monotonic() - started)

    def _give_up(self, makers: Sequence[Maker], why: str) -> None:
        """Added makers that do not come up cost nobody anything: the run goes on with those that it has."""
        for maker in makers:
            self._actors.remove(maker)
        left = len(self._actors.makers)
        ask(self._actors.coordinator, "scale", left)
        self._answer(f"{', '.join(maker.name for maker in makers)} {why}; the run goes on with {left} makers")

    def _room(self, num_makers: int) -> str:
        config = self._actors.config
        return room(num_makers * config.maker_cpus, num_makers * config.maker_gpus)

    def _answer(self, problem: str) -> None:
        """The request is done, or with a problem refused."""
        if problem:
            logger.error("%s", problem)
        if self._request is not None:
            self.answer = ScaleAnswer(id=self._request.id, problem=printable(problem))
        self._request = None
