"""`Fleet`: the makers of a running job. How many there are, and which come, are replaced, and go.

It aims at a number of makers, which `rlhf ray scale` changes. One more needs room first, then starts as those of the
start do. One less, or one whose node is being drained, gets no more prompts; it ends when it has sent what it makes and
the trainers need none of its samples, or at a deadline, and what is left of its work is then made again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rlhf_core.errors import EngineLostError, RlhfError
from rlhf_core.util import printable

from .actors import Actors, Maker, Placement, lacking
from .calls import ActorLostError, ask, error_of, explain, is_lost
from .cluster import cluster_address, draining_nodes
from .messages import Overview
from .scale_request import ScaleAnswer, ScaleRequest, ScaleRequests

logger = logging.getLogger("rlhf.ray")

_LOCAL_ROOM_SECONDS = 10.0
"""Longest wait for room in a local Ray, which does not grow."""
_NODE_MARGIN_SECONDS = 5.0
"""A maker gives its prompts back so long before its node goes."""
_NODES_SECONDS = 2.0
"""Between two looks for nodes that are being drained."""


@dataclass(slots=True)
class _Coming:
    """A maker that waits for room."""

    maker: Maker
    place: Placement
    deadline: float
    """Infinite for one that takes the place of another."""


@dataclass(slots=True)
class _Leaving:
    """A maker that gets no more prompts."""

    maker: Maker
    deadline: float
    has_ended: bool = False


class Fleet:
    """The makers that are there, those that wait for room, and those that leave."""

    def __init__(self, actors: Actors, folder: Path, *, nodes_may_go: bool) -> None:
        """nodes_may_go: look for nodes that are being drained; a Ray of the run's own has one node, which stays."""
        self._actors = actors
        self._requests = ScaleRequests(folder)
        self._requests.clear()
        self.target = actors.num_makers
        """Makers that the run is to have."""
        self.answer: ScaleAnswer | None = None
        """To the newest request."""
        self._request: ScaleRequest | None = None
        """That is not done."""
        self._deadline = 0.0
        self._coming: list[_Coming] = []
        self._leaving: list[_Leaving] = []
        self._joined: set[str] = set()
        """Names of makers that have been registered once."""
        self._ended: set[Any] = set()
        """References to the results of those whose loop has ended."""
        self._nodes_at = 0.0 if nodes_may_go else float("inf")
        self._saves = False
        """Whether checkpoints were requested, since a trainer's node is being drained."""

    @property
    def waiting_for_room(self) -> list[str]:
        return [each.maker.name for each in self._coming]

    @property
    def leaving(self) -> list[Maker]:
        return [each.maker for each in self._leaving]

    def step(self, view: Overview) -> None:
        """Look once at all of them. Raises what ends the run."""
        there = {row["name"] for row in view.makers}
        self._joined |= {maker.name for maker in self._actors.makers if maker.id in there}
        works = [maker.work for maker in [*self._actors.makers, *self.leaving]]
        self._ended = set(ray.wait(works, num_returns=len(works), timeout=0)[0]) if works else set()
        self._take_request()
        self._look_at_nodes(view)
        self._watch(view)
        self._let_go(view)
        self._let_in()
        self._aim()
        self._tell(view)

    def _take_request(self) -> None:
        if (request := self._requests.take()) is None:
            return
        logger.warning("asked for %d makers; there are %d", request.makers, len(self._actors.makers))
        self._request, self._deadline = request, time.monotonic() + request.timeout_seconds
        if not self._actors.num_makers:
            self._refuse("this run has no makers: nothing is generated")
            return
        self._set_target(request.makers)

    def _set_target(self, count: int) -> None:
        self.target = count
        ask(self._actors.coordinator, "scale", count)

    def _aim(self) -> None:
        """Ask for room for missing makers, or have the newest leave."""
        makers = self._actors.makers
        while len(makers) + len(self._coming) > self.target:
            if self._coming:
                self._coming.pop().place.release()
            else:
                self._leave(makers[-1], self._deadline, "the run is to have fewer makers")
        while self.target > len(makers) + len(self._coming):
            maker, place = self._actors.room_for_another([each.maker for each in self._coming])
            deadline = float("inf")
            if self._request is not None:
                own = _LOCAL_ROOM_SECONDS if cluster_address(self._actors.config) is None else float("inf")
                deadline = min(self._deadline, time.monotonic() + own)
            self._coming.append(_Coming(maker, place, deadline))

    def _let_in(self) -> None:
        """Start the makers for which there is room; those of a request all together, or none of them."""
        ready = [each for each in self._coming if each.place.is_ready()]
        if self._request is not None and len(ready) < len(self._coming):
            ready = []
        for each in ready:
            self._coming.remove(each)
            self._actors.add(each.maker, each.place)
            logger.info("%s has room and starts", each.maker.name)
        if any(each.deadline <= time.monotonic() for each in self._coming):
            told = lacking(each.place for each in self._coming)
            for each in self._coming:
                each.place.release()
            self._coming.clear()
            self._give_up(f"there is no room for {told}")

    def _leave(self, maker: Maker, deadline: float, why: str) -> None:
        self._actors.makers.remove(maker)
        self._leaving.append(_Leaving(maker, deadline))
        logger.warning("%s leaves: %s", maker.name, why)
        ask(self._actors.coordinator, "leave", maker.id)

    def _let_go(self, view: Overview) -> None:
        """End the makers that leave and of which nothing is needed any more."""
        for each in list(self._leaving):
            maker = each.maker
            if each.has_ended and not view.owned.get(maker.id):
                self._end(each, "has left")
            elif maker.name not in self._joined:
                self._end(each, "leaves before it was ready")
            elif time.monotonic() >= each.deadline:
                self._end(each, "leaves at its deadline")
            elif maker.id in view.stuck:
                self._end(each, f"is held for dead: it {view.stuck[maker.id]}")
            elif not each.has_ended and self._has_ended(maker):
                each.has_ended = True  # what it sent last counts from the next look on
                if (error := error_of(maker.work)) is not None:
                    self._end(each, str(explain(maker.name, error).message))

    def _end(self, each: _Leaving, how: str) -> None:
        self._leaving.remove(each)
        lost = self._actors.remove(each.maker)
        logger.warning("%s %s; %d of its prompts will be made again", each.maker.name, how, lost)

    def _watch(self, view: Overview) -> None:
        """Replace the makers that are lost or stuck."""
        for maker in list(self._actors.makers):
            if self._has_ended(maker):
                error = error_of(maker.work)
                if error is None:
                    raise RlhfError("its loop ended before the run did", where=maker.name)
                told = explain(maker.name, error)
                if maker.is_added and maker.name not in self._joined:
                    self._give_up_one(maker, str(told.message))
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

    def _look_at_nodes(self, view: Overview) -> None:
        """Have the makers leave whose node Ray is about to lose; others take their places. A trainer cannot move."""
        now = time.monotonic()
        if now - self._nodes_at < _NODES_SECONDS:
            return
        self._nodes_at = now
        nodes = {str(row["name"]): str(row["node"]) for row in view.makers}
        for node, left in draining_nodes().items():
            room = self._actors.config.lease_seconds if left is None else max(0.0, left - _NODE_MARGIN_SECONDS)
            for maker in [each for each in self._actors.makers if nodes.get(each.id) == node]:
                self._leave(maker, now + room, f"its node is being drained, and goes in {room:.0f} s at the latest")
            if trainers := [trainer.name for trainer in self._actors.trainers if trainer.node == node]:
                self._save(", ".join(trainers))

    def _save(self, trainers: str) -> None:
        """Request a checkpoint at the end of each episode: with a trainer's node the run ends."""
        if not self._saves:
            self._saves = True
            logger.error(
                "the node of %s is being drained: with it the run ends, and --resume auto goes on from its last "
                "checkpoint; until then each episode writes one",
                trainers,
            )
        self._actors.coordinator.request_checkpoint.remote()

    def _give_up_one(self, maker: Maker, why: str) -> None:
        """An added maker that does not come up costs nobody anything."""
        self._actors.remove(maker)
        self._give_up(f"{maker.name} does not start: {why}")

    def _give_up(self, why: str) -> None:
        """The run goes on with the makers that it has."""
        self._set_target(max(1, len(self._actors.makers)))
        self._refuse(f"{why}; the run goes on with {self.target}")

    def _refuse(self, why: str) -> None:
        logger.error("%s", why)
        if self._request is not None:
            self.answer = ScaleAnswer(id=self._request.id, state="refused", text=why)
        self._request = None

    def _tell(self, view: Overview) -> None:
        if self._request is None:
            return
        late = [maker for maker in self._actors.makers if maker.name not in self._joined and maker.is_added]
        if late and time.monotonic() >= self._deadline:
            for maker in late:
                self._actors.remove(maker)
            self._give_up(f"{_names(late)} did not load its models within {self._request.timeout_seconds:g} s")
            return
        if not late and not self._coming and not self._leaving:
            self.answer = ScaleAnswer(id=self._request.id, state="done", text=f"{len(self._actors.makers)} makers")
            logger.warning("the run has %d makers now", len(self._actors.makers))
            self._request = None
            return
        parts = [f"{_names(each.maker for each in self._coming)} waits for room" if self._coming else ""]
        parts.append(f"{_names(late)} loads its models" if late else "")
        for each in self._leaving:
            held = view.owned.get(each.maker.id, 0)
            left = max(0.0, each.deadline - time.monotonic())
            parts.append(f"{each.maker.name} leaves, {held} groups of its are needed, at the latest in {left:.0f} s")
        text = "; ".join(part for part in parts if part)
        self.answer = ScaleAnswer(id=self._request.id, state="working", text=printable(text))

    def _has_ended(self, maker: Maker) -> bool:
        return maker.work in self._ended


def _names(makers: Iterable[Maker]) -> str:
    return ", ".join(maker.name for maker in makers)
