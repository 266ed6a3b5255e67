"""The in-process experience channel: the trainer's own process makes its rollouts, every rank its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RlhfError
from ..place import Place
from ..rewards.scorer import RewardScorer
from ..types import MadeEpisode, Prompt, RolloutGroup
from .made import made_episode

if TYPE_CHECKING:
    from .coordinator import RolloutCoordinator
    from .maker import PolicyExperienceMaker
    from .sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChannel:
    """Every rank makes its share of an episode's prompts, then all ranks exchange their groups.

    The coordinators of all ranks see the same groups in the same order, so they stay equal without communication.
    """

    coordinator: RolloutCoordinator[RolloutGroup]
    prompt: Callable[[int, int | None], Prompt]
    """Of a position, and of the record that a sampler has drawn for it."""
    maker: PolicyExperienceMaker
    place: Place
    keep: Callable[[RolloutGroup], bool]
    sampler: Sampler | None = None
    """Judges the groups; the coordinator draws by it."""

    def episode(self, index: int) -> MadeEpisode:
        """Make the episode, in as many waves as dynamic sampling needs."""
        while not self.coordinator.ready(index):
            leases = self.coordinator.lease(1 << 30)
            if not leases:
                raise RlhfError(f"episode {index} cannot go on: {self.coordinator.progress(index)}", where="rollout")
            mine = leases[self.place.rank :: self.place.world_size]
            made = list(self.maker.make([self.prompt(lease.position, lease.record) for lease in mine]))
            gathered = [group for part in self.place.all_gather_objects(made) for group in part]
            for group in sorted(gathered, key=lambda g: g.position):
                keep = not group.is_empty and self.keep(group)
                success = None if self.sampler is None else self.sampler.judge(group)
                self.coordinator.submit(group, keep=keep, success=success)
        groups = self.coordinator.take(index)
        return made_episode(
            [item for group in groups for item in group.items],
            self.maker.take_times(),
            rollouts=[rollout for group in groups for rollout in group.rollouts],
            metrics=self.coordinator.take_metrics(),
        )

    def published(self, version: int) -> None:
        self.coordinator.publish(version)
        self.maker.published(version)

    def state_dict(self) -> dict[str, Any]:
        """The coordinator's state, which has no groups: between two episodes all of them are taken."""
        return self.coordinator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Groups of a transport that makes episodes ahead of their training are made again."""
        self.coordinator.load_state_dict(
            {**state, "open": {index: _made_again(saved) for index, saved in state["open"].items()}}
        )

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _made_again(episode: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an open episode whose finished groups are made again."""
    positions = [group["position"] for group in episode["accepted"]]
    learnt = sorted(set(positions) - {int(position) for position in episode.get("outcomes", ())})
    return {**episode, "accepted": [], "outstanding": sorted([*episode["outstanding"], *positions]), "learnt": learnt}


@dataclass(frozen=True, slots=True)
class RankedStates:
    """State of all ranks' rewards and players. After a resume with more ranks, some start from the same one."""

    scorer: RewardScorer
    place: Place
    maker: PolicyExperienceMaker | None

    def states(self) -> list[dict[str, Any]]:
        parts = {"rewards": self.scorer.state_dict(), "players": {} if self.maker is None else self.maker.state_dict()}
        states = self.place.all_gather_objects({name: part for name, part in parts.items() if part})
        return states if any(states) else []

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        state = states[self.place.rank % len(states)]
        self.scorer.load_state_dict(state.get("rewards", {}))
        if self.maker is not None:
            self.maker.load_state_dict(state.get("players", {}))
