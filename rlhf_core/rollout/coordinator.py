"""Assigns prompts to makers and tracks their groups. In every deployment it is the only owner of prompts.

It uses neither tensors nor a transport, so it runs in the trainer's process or as a separate actor. A transport whose
makers may be lost extends it with deadlines (`rlhf-ray`).

- Episode e takes the next `prompts_per_episode` positions of the prompt stream when it opens. Without dynamic sampling
  these are exactly [eP, (e+1)P). Refused groups (dynamic sampling) are replaced by later positions, wave by wave: only
  after every outstanding group of the episode has arrived, so the choice does not depend on timing.
- A position may be sampled once its episode is at most `max_staleness` ahead of the policy version, and no complete
  episode waits for the trainer: samples made before they are needed only become stale.
- The record of a position is a function of the seed or, with a sampler, drawn together with the position. A sampler
  learns from the groups of a whole wave, in position order.
- A group enters exactly one episode: a second group for a position is refused.
- A position that is sampled again keeps its sample ids.
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
    """Assignment of one prompt to a maker."""

    position: int
    """Position in the prompt stream."""
    episode: int
    """Index of the episode."""
    record: int | None = None
    """Index in the source. None if it follows from the position."""


@dataclass(slots=True)
class EpisodeLedger(Generic[GroupT]):
    """Groups of an open episode, which has begun and was not taken yet."""

    outstanding: dict[int, str | None] = field(default_factory=dict)
    """Position -> maker, or None if unassigned. Only of groups that have not arrived."""
    accepted: dict[int, GroupT] = field(default_factory=dict)
    """Position -> group to train on."""
    refused: int = 0
    """Number of refused groups."""
    outcomes: dict[int, float | None] = field(default_factory=dict)
    """Position -> success, or None once the sampler has learned it, so that a repeated group does not count twice."""
    records: dict[int, int] = field(default_factory=dict)
    """Position -> record. Empty without a sampler."""
    emptied: int = 0
    """Number of refused groups without samples since the last resume. Only for the error message."""


class RolloutCoordinator(Generic[GroupT]):
    """Prompt cursor, leases, admission, policy versions and ledger of a run. Not thread-safe.

    Example:
        >>> from rlhf_core.types import RolloutGroup
        >>> coordinator = RolloutCoordinator(num_episodes=2, prompts_per_episode=2)
        >>> [lease.position for lease in coordinator.lease(8)]
        [0, 1]
        >>> for position in (1, 0):
        ...     accepted = coordinator.submit(RolloutGroup(position=position, rollouts=(), items=()))
        >>> [group.position for group in coordinator.take(0)]
        [0, 1]
        >>> coordinator.why_closed()
        'max_staleness: the next prompts need policy version 1'
    """

    def __init__(
        self,
        *,
        num_episodes: int,
        prompts_per_episode: int,
        max_staleness: int = 0,
        max_refill_factor: int = 10,
        sampler: Sampler | None = None,
    ) -> None:
        """Create a coordinator at the start of a run.

        Args:
            num_episodes: Episodes of the run.
            prompts_per_episode: Groups that an episode trains on.
            max_staleness: Maximum number of policy versions by which an episode may be ahead of the published one.
            max_refill_factor: Refused groups of an episode, per prompt of the episode, after which the run fails.
            sampler: Draws the records. None if the record of a position follows from the position.
        """
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
        """Number of prompts of the last taken episode that were replaced."""

    @property
    def version(self) -> int:
        """Newest published policy version."""
        return self._version

    @property
    def finished(self) -> bool:
        """Whether the last episode was taken for training."""
        return self._taken >= self._num_episodes

    def lease(self, count: int, maker: str = "") -> list[Lease]:
        """Assign up to `count` positions to a maker, lowest first. May be empty, see `why_closed`."""
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
        """Record a finished group. Returns False if it is ignored: a duplicate, or its episode was taken.

        Args:
            group: All samples of a prompt.
            keep: False refuses it for training. Another position is then drawn to replace it.
            success: The result of `Sampler.judge`.
        """
        index = next((index for index, each in self._open.items() if group.position in each.outstanding), None)
        if index is None:
            return False
        episode = self._open[index]
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
            self._refill(index, episode)
        return True

    def ready(self, episode: int) -> bool:
        """Whether all groups of `episode` are complete."""
        state = self._open.get(episode)
        return state is not None and not state.outstanding and len(state.accepted) >= self._prompts_per_episode

    @property
    def next_is_ready(self) -> bool:
        """Whether all groups of the next episode to be taken are complete."""
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
        """Note that the trainer has published `version`, so that later positions may start."""
        if version < self._version:
            raise RlhfError(f"version {version} is older than {self._version}", where="coordinator")
        self._version = version

    def take_metrics(self) -> dict[str, float]:
        """Return `rollout/refused_prompts` of the last taken episode, and the metrics of a sampler."""
        own = {} if self._sampler is None else self._sampler.take_metrics()
        return {"rollout/refused_prompts": float(self.refused_prompts), **own}

    def progress(self, episode: int) -> str:
        """Return the progress of `episode` as text."""
        state = self._open.get(episode)
        if state is None:
            return f"it is not open (the next to open is {self._next_episode}, {self._taken} were trained on)"
        return f"{len(state.accepted)} of {self._prompts_per_episode} groups are complete"

    def why_closed(self) -> str | None:
        """Return the reason why the next episode may not start yet, or None if it may."""
        if self._next_episode >= self._num_episodes:
            return "all prompts of the run are complete or assigned"
        if self._next_episode > self._version + self._max_staleness:
            return f"max_staleness: the next prompts need policy version {self._next_episode - self._max_staleness}"
        if self.next_is_ready:
            return "a complete episode waits for the trainers"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state without leases: assigned prompts are sampled again after a resume."""
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
        """Restore the result of `state_dict`, also in the middle of a run."""
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
            positions = (*episode.outstanding, *episode.accepted)
            episode.records = {position: records[position] for position in positions if position in records}
            # Older checkpoints omit outcomes that the sampler has learned.
            episode.outcomes = dict.fromkeys(episode.accepted) | episode.outcomes

    def _open_next(self) -> bool:
        """Create the ledger of the next episode and draw its prompts. Returns False if it may not start yet."""
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
        """(episode, position) of the unassigned groups, lowest first."""
        return sorted(
            (index, position)
            for index, episode in self._open.items()
            for position, maker in episode.outstanding.items()
            if maker is None
        )

    def _learn(self, episode: EpisodeLedger[GroupT]) -> None:
        """Pass the outcomes of a wave to the sampler, in an order that does not depend on timing."""
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
                    f"episode {index} lost all samples: on_failure dropped those of {episode.emptied} prompts",
                    where="rewards",
                    hint="see the rewards' failures in the log, or set on_failure: fail to stop at the first",
                )
            raise RlhfError(
                f"episode {index} drew {episode.refused} prompts that were all refused, and still needs {missing}",
                where="dynamic sampling",
                hint="every answer to these prompts gets the same reward. Use easier prompts, a finer reward, "
                "more samples_per_prompt, or turn dynamic sampling off",
            )
        self._draw(index, missing)
