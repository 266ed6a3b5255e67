"""Assigns prompts to makers and tracks their groups: the one owner of prompts in every deployment.

It uses neither tensors nor a transport, so it runs in the trainer's process or as a separate actor.

- Episode e takes the next `prompts_per_episode` positions of the prompt stream when it opens; without dynamic
  sampling these are exactly [eP, (e+1)P). Refused groups (dynamic sampling) are replaced by later positions,
  wave by wave: only when every outstanding group of the episode has arrived, so the choice does not depend on timing.
- A position may be made once its episode is at most `max_staleness` ahead of the policy version, and no complete
  episode waits for the trainer: samples made before they are needed only become stale.
- Which record a position has is a function of the seed or, with a curriculum, drawn when the position is. A curriculum
  learns from the groups of a whole wave, in position order.
- A group enters exactly one episode: a second group for a position is refused.
- A lease ends at its deadline, or when its maker is known dead. The position is then made again under the same
  sample ids (`attempt` counts).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from ..errors import RewardError, RlhfError


class Group(Protocol):
    """All samples of one prompt, in any transfer format."""

    @property
    def position(self) -> int: ...

    @property
    def is_empty(self) -> bool: ...


GroupT = TypeVar("GroupT", bound=Group)


class Sampler(Protocol):
    """Decides which records are drawn, from the success of those drawn before (`prompts.curriculum`)."""

    def draw(self, count: int, episode: int) -> list[int]:
        """The records of the next `count` positions, for an episode."""
        ...

    def learn(self, record: int, success: float) -> None:
        """Take in the share of a record's answers that succeeded."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to make one prompt."""

    position: int
    episode: int
    attempt: int
    record: int | None = None
    """Index in the source; None where it follows from the position."""


@dataclass(slots=True)
class _Held:
    maker: str
    expires: float
    attempt: int


@dataclass(slots=True)
class _Episode(Generic[GroupT]):
    outstanding: dict[int, int]
    """Position -> attempts so far, for groups that have not arrived."""
    accepted: dict[int, GroupT] = field(default_factory=dict)
    refused: int = 0
    outcomes: dict[int, float] = field(default_factory=dict)
    """Position -> share of successes, of groups of the wave that is not over."""
    emptied: int = 0
    """Refused groups without a sample; counted since the last resume, for the error only."""


class RolloutCoordinator(Generic[GroupT]):
    """Prompt cursor, leases, admission, versions and ledger. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        *,
        num_episodes: int,
        prompts_per_episode: int,
        max_staleness: int = 0,
        lease_seconds: float = 600.0,
        max_refill_factor: int = 10,
        clock: Callable[[], float] = time.monotonic,
        sampler: Sampler | None = None,
    ) -> None:
        """sampler: draws the records; None: the record of a position is known to those who ask for it."""
        self._sampler = sampler
        self._records: dict[int, int] = {}
        """Position -> record, of those that are outstanding or whose wave is not over."""
        self._num_episodes = num_episodes
        self._prompts_per_episode = prompts_per_episode
        self._max_staleness = max_staleness
        self._lease_seconds = lease_seconds
        self._max_refill_factor = max_refill_factor
        self._clock = clock
        self._version = 0
        self._cursor = 0
        self._next_episode = 0
        self._taken = 0
        self._open: dict[int, _Episode[GroupT]] = {}
        self._held: dict[int, _Held] = {}
        self.refused_prompts = 0
        """Prompts of the last taken episode that were replaced by others."""

    @property
    def version(self) -> int:
        """The newest published policy version."""
        return self._version

    @property
    def finished(self) -> bool:
        """True when the last episode was handed out for training."""
        return self._taken >= self._num_episodes

    def lease(self, maker: str, count: int) -> list[Lease]:
        """Lease up to `count` positions to `maker`, lowest first; none when staleness or the run's end forbids more."""
        self._expire()
        leases: list[Lease] = []
        while len(leases) < count:
            found = self._next_unheld()
            if found is None:
                break
            episode, position = found
            attempt = self._open[episode].outstanding[position] + 1
            self._open[episode].outstanding[position] = attempt
            self._held[position] = _Held(maker, self._clock() + self._lease_seconds, attempt)
            leases.append(Lease(position, episode, attempt, self._records.get(position)))
        return leases

    def submit(self, group: GroupT, *, keep: bool = True, success: float | None = None) -> bool:
        """Accept a finished group. False: it is refused (made twice, or its episode has ended).

        `keep=False` refuses it for training; another position is drawn in its place. `success`: the share of its
        answers that succeeded, for a curriculum; None where it has none.
        """
        found = self._episode_of(group.position)
        if found is None:
            return False
        episode = self._open[found]
        del episode.outstanding[group.position]
        self._held.pop(group.position, None)
        if keep:
            episode.accepted[group.position] = group
        else:
            episode.refused += 1
            episode.emptied += group.is_empty
        if success is not None:
            episode.outcomes[group.position] = success
        if not episode.outstanding:
            self._learn(episode)
            self._refill(found, episode)
        return True

    def ready(self, episode: int) -> bool:
        """Whether `episode` has all its groups."""
        state = self._open.get(episode)
        return state is not None and not state.outstanding and len(state.accepted) >= self._prompts_per_episode

    def take(self, episode: int) -> list[GroupT]:
        """Return the complete episode for training, in position order. Each episode is taken once, in order."""
        if episode != self._taken or not self.ready(episode):
            raise RlhfError(f"episode {episode} cannot be taken: {self.progress(episode)}", where="coordinator")
        self._taken += 1
        state = self._open.pop(episode)
        self.refused_prompts = state.refused
        return [state.accepted[position] for position in sorted(state.accepted)]

    def publish(self, version: int) -> None:
        """The trainer has published `version`; later positions may start."""
        if version < self._version:
            raise RlhfError(f"version {version} follows {self._version}", where="coordinator")
        self._version = version

    def take_metrics(self) -> dict[str, float]:
        """Of the last taken episode: `rollout/refused_prompts`, and those of a curriculum."""
        own = {} if self._sampler is None else self._sampler.take_metrics()
        return {"rollout/refused_prompts": float(self.refused_prompts), **own}

    def release(self, maker: str) -> int:
        """End all leases of a maker that is gone; returns how many prompts will be made again."""
        lost = [position for position, held in self._held.items() if held.maker == maker]
        for position in lost:
            del self._held[position]
        return len(lost)

    def progress(self, episode: int) -> str:
        """Text on what `episode` still waits for."""
        state = self._open.get(episode)
        if state is None:
            return f"it is not open (the next to open is {self._next_episode}, {self._taken} were trained on)"
        held = [f"{p} at {self._held[p].maker}" for p in sorted(state.outstanding) if p in self._held]
        waiting = f"; in the making: {', '.join(held[:4])}{' …' if len(held) > 4 else ''}" if held else ""
        return f"{len(state.accepted)} of {self._prompts_per_episode} groups are in{waiting}"

    def state_dict(self) -> dict[str, Any]:
        """Everything but leases: prompts in flight are made again after a resume."""
        return {
            "version": self._version,
            "cursor": self._cursor,
            "next_episode": self._next_episode,
            "taken": self._taken,
            "records": {str(position): record for position, record in self._records.items()},
            "sampler": None if self._sampler is None else self._sampler.state_dict(),
            "open": {
                str(index): {
                    "outstanding": sorted(state.outstanding),
                    "accepted": [state.accepted[p] for p in sorted(state.accepted)],
                    "refused": state.refused,
                    "outcomes": {str(position): success for position, success in state.outcomes.items()},
                }
                for index, state in self._open.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._version = state["version"]
        self._cursor = state["cursor"]
        self._next_episode = state["next_episode"]
        self._taken = state["taken"]
        self._held = {}
        # A checkpoint from before there were curricula has neither.
        self._records = {int(position): record for position, record in state.get("records", {}).items()}
        if self._sampler is not None and state.get("sampler") is not None:
            self._sampler.load_state_dict(state["sampler"])
        self._open = {
            int(index): _Episode(
                outstanding=dict.fromkeys(saved["outstanding"], 0),
                accepted={group.position: group for group in saved["accepted"]},
                refused=saved["refused"],
                outcomes={int(position): success for position, success in saved.get("outcomes", {}).items()},
            )
            for index, saved in state["open"].items()
        }

    def _next_unheld(self) -> tuple[int, int] | None:
        """(episode, position) of the lowest unleased position; opens the next episode if it may start."""
        for index in sorted(self._open):
            for position in sorted(self._open[index].outstanding):
                if position not in self._held:
                    return index, position
        if self._next_episode >= self._num_episodes or self._next_episode > self._version + self._max_staleness:
            return None
        if self.ready(self._taken):
            return None
        index = self._next_episode
        self._next_episode += 1
        self._open[index] = _Episode(outstanding=self._draw(self._prompts_per_episode, index))
        return self._next_unheld()

    def _draw(self, count: int, episode: int) -> dict[int, int]:
        positions = range(self._cursor, self._cursor + count)
        self._cursor += count
        if self._sampler is not None:
            self._records.update(zip(positions, self._sampler.draw(count, episode), strict=True))
        return dict.fromkeys(positions, 0)

    def _learn(self, episode: _Episode[GroupT]) -> None:
        """Hand the outcomes of a wave to the sampler, in an order that does not depend on timing."""
        if self._sampler is None:
            return
        for position in sorted(episode.outcomes):
            self._sampler.learn(self._records[position], episode.outcomes[position])
        episode.outcomes.clear()
        outstanding = {position for state in self._open.values() for position in (*state.outstanding, *state.outcomes)}
        self._records = {position: record for position, record in self._records.items() if position in outstanding}

    def _refill(self, index: int, episode: _Episode[GroupT]) -> None:
        missing = self._prompts_per_episode - len(episode.accepted)
        if missing <= 0:
            return
        if episode.refused > self._max_refill_factor * self._prompts_per_episode:
            if episode.emptied == episode.refused:
                raise RewardError(
                    f"episode {index} has no sample left: the reward policy dropped those of {episode.emptied} prompts",
                    where="rewards",
                    hint="see the rewards' failures in the log, or set on_failure: fail to stop at the first",
                )
            raise RlhfError(
                f"episode {index} drew {episode.refused} prompts that were all refused, and still lacks {missing}",
                where="dynamic sampling",
                hint="every answer to these prompts gets the same reward; use easier prompts, a finer reward, "
                "more samples_per_prompt, or turn dynamic sampling off",
            )
        episode.outstanding = self._draw(missing, index)

    def _episode_of(self, position: int) -> int | None:
        return next((i for i, state in self._open.items() if position in state.outstanding), None)

    def _expire(self) -> None:
        now = self._clock()
        for position in [p for p, held in self._held.items() if held.expires <= now]:
            del self._held[position]
