"""Assigns prompts to makers and tracks their groups: the one owner of prompts in every deployment.

It uses neither tensors nor a transport, so it runs in the trainer's process or as a separate actor. A transport whose
makers may be lost extends it with deadlines (`rlhf-ray`).

- Episode e takes the next `prompts_per_episode` positions of the prompt stream when it opens; without dynamic
  sampling these are exactly [eP, (e+1)P). Refused groups (dynamic sampling) are replaced by later positions,
  wave by wave: only when every outstanding group of the episode has arrived, so the choice does not depend on timing.
- A position may be made once its episode is at most `max_staleness` ahead of the policy version, and no complete
  episode waits for the trainer: samples made before they are needed only become stale.
- Which record a position has is a function of the seed or, with a sampler, drawn when the position is. A sampler
  learns from the groups of a whole wave, in position order.
- A group enters exactly one episode: a second group for a position is refused.
- A position that is made again keeps its sample ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from ..errors import RewardError, RlhfError
from ..protocols import Sampler


class Group(Protocol):
    """All samples of one prompt, in any transfer format."""

    @property
    def position(self) -> int: ...

    @property
    def is_empty(self) -> bool: ...


GroupT = TypeVar("GroupT", bound=Group)


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to make one prompt."""

    position: int
    episode: int
    record: int | None = None
    """Index in the source; None where it follows from the position."""


@dataclass(slots=True)
class EpisodeLedger(Generic[GroupT]):
    """The groups of an episode that has begun and was not taken."""

    outstanding: dict[int, str | None] = field(default_factory=dict)
    """Position -> who makes the group, None where nobody does; of groups that have not arrived."""
    accepted: dict[int, GroupT] = field(default_factory=dict)
    refused: int = 0
    outcomes: dict[int, float | None] = field(default_factory=dict)
    """Position -> success, None once the sampler has learnt it; a group that is made again does not count twice."""
    records: dict[int, int] = field(default_factory=dict)
    """Position -> record, where a sampler draws them."""
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
        max_refill_factor: int = 10,
        sampler: Sampler | None = None,
    ) -> None:
        """sampler: draws the records; None: the record of a position is known to those who ask for it."""
        self._sampler = sampler
        self._num_episodes = num_episodes
        self._prompts_per_episode = prompts_per_episode
        self._max_staleness = max_staleness
        self._max_refill_factor = max_refill_factor
        self._version = 0
        self._cursor = 0
        self._next_episode = 0
        self._taken = 0
        self._open: dict[int, EpisodeLedger[GroupT]] = {}
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

    def lease(self, count: int, maker: str = "") -> list[Lease]:
        """Lease up to `count` positions, lowest first; none when staleness or the run's end forbids more."""
        while len(self._free()) < count and self._open_next():
            pass
        leases: list[Lease] = []
        for index, position in self._free()[:count]:
            episode = self._open[index]
            episode.outstanding[position] = maker
            leases.append(Lease(position, index, episode.records.get(position)))
        return leases

    @property
    def can_lease(self) -> bool:
        """Whether a position of an open episode waits for a maker."""
        return bool(self._free())

    def submit(self, group: GroupT, *, keep: bool = True, success: float | None = None) -> bool:
        """Accept a finished group. False: it is refused (made twice, or its episode has ended).

        `keep=False` refuses it for training; another position is drawn in its place. `success`: what
        `Sampler.judge` returned.
        """
        found = next((index for index, each in self._open.items() if group.position in each.outstanding), None)
        if found is None:
            return False
        episode = self._open[found]
        del episode.outstanding[group.position]
        if keep:
            episode.accepted[group.position] = group
        else:
            episode.refused += 1
            episode.emptied += group.is_empty
        if success is not None:
            episode.outcomes.setdefault(group.position, success)
        if not episode.outstanding:
            self._learn(episode)
            self._refill(found, episode)
        return True

    def ready(self, episode: int) -> bool:
        """Whether `episode` has all its groups."""
        state = self._open.get(episode)
        return state is not None and not state.outstanding and len(state.accepted) >= self._prompts_per_episode

    @property
    def next_is_ready(self) -> bool:
        """Whether the next episode to be taken has all its groups."""
        return self.ready(self._taken)

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
        """Metrics of the last taken episode: `rollout/refused_prompts`, and those of a sampler."""
        own = {} if self._sampler is None else self._sampler.take_metrics()
        return {"rollout/refused_prompts": float(self.refused_prompts), **own}

    def progress(self, episode: int) -> str:
        """Text on what `episode` still waits for."""
        state = self._open.get(episode)
        if state is None:
            return f"it is not open (the next to open is {self._next_episode}, {self._taken} were trained on)"
        return f"{len(state.accepted)} of {self._prompts_per_episode} groups are in"

    def why_closed(self) -> str | None:
        """Why the next episode may not start yet; None where it may."""
        if self._next_episode >= self._num_episodes:
            return "every prompt of the run is made or in the making"
        if self._next_episode > self._version + self._max_staleness:
            return f"max_staleness: the next prompts need policy version {self._next_episode - self._max_staleness}"
        if self.next_is_ready:
            return "a complete episode waits for the trainers"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything but leases: prompts in flight are made again after a resume."""
        return {
            "version": self._version,
            "cursor": self._cursor,
            "next_episode": self._next_episode,
            "taken": self._taken,
            "records": {str(p): record for state in self._open.values() for p, record in state.records.items()},
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
        records = {int(position): record for position, record in state.get("records", {}).items()}
        if self._sampler is not None and state.get("sampler") is not None:
            self._sampler.load_state_dict(state["sampler"])
        self._open = {
            int(index): EpisodeLedger(
                outstanding=dict.fromkeys(saved["outstanding"]),
                accepted={group.position: group for group in saved["accepted"]},
                refused=saved["refused"],
                outcomes={int(position): success for position, success in saved.get("outcomes", {}).items()},
            )
            for index, saved in state["open"].items()
        }
        for episode in self._open.values():
            held = [position for position in (*episode.outstanding, *episode.accepted) if position in records]
            episode.records = {position: records[position] for position in held}
            # Older checkpoints leave out what is learnt.
            episode.outcomes = dict.fromkeys(episode.accepted) | episode.outcomes

    def _open_next(self) -> bool:
        """Open the next episode, if it may start."""
        if self.why_closed() is not None:
            return False
        index = self._next_episode
        self._next_episode += 1
        self._open[index] = EpisodeLedger()
        self._draw(index, self._prompts_per_episode)
        return True

    def _draw(self, index: int, count: int) -> None:
        """Add the next positions of the stream to the episode."""
        episode = self._open[index]
        positions = range(self._cursor, self._cursor + count)
        self._cursor += count
        if self._sampler is not None:
            episode.records.update(zip(positions, self._sampler.draw(count, index), strict=True))
        episode.outstanding.update(dict.fromkeys(positions))

    def _free(self) -> list[tuple[int, int]]:
        """(episode, position) of the groups that nobody makes, lowest first."""
        return sorted(
            (index, position)
            for index, episode in self._open.items()
            for position, maker in episode.outstanding.items()
            if maker is None
        )

    def _learn(self, episode: EpisodeLedger[GroupT]) -> None:
        """Hand the outcomes of a wave to the sampler, in an order that does not depend on timing."""
        if self._sampler is None:
            return
        for position, success in sorted(episode.outcomes.items()):
            if success is not None:
                self._sampler.learn(episode.records[position], success)
        episode.outcomes = dict.fromkeys(episode.outcomes)

    def _refill(self, index: int, episode: EpisodeLedger[GroupT]) -> None:
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
        self._draw(index, missing)
