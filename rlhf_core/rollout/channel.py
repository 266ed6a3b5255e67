"""The in-process experience channel: the trainer's own process makes its rollouts, every rank its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.curriculum import CurriculumConfig
from ..errors import RlhfError
from ..place import Place
from ..rewards.scorer import RewardScorer
from ..types import MadeEpisode, Prompt, RolloutGroup
from .groups import coordinator_from_tree, coordinator_to_tree
from .made import made_episode

if TYPE_CHECKING:
    from .coordinator import RolloutCoordinator
    from .maker import PolicyExperienceMaker


def success_of(options: CurriculumConfig | None) -> Callable[[RolloutGroup], float | None]:
    """For a group, the share of its samples whose score is a success; None without a curriculum, or a sample."""

    def share(group: RolloutGroup) -> float | None:
        samples = [item.rewards for item in group.items if item.branch == 0]
        if options is None or not samples:
            return None
        name = options.reward or next(iter(samples[0]))
        return sum(rewards[name] >= options.success_score for rewards in samples) / len(samples)

    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChannel:
    """Every rank makes its share of an episode's prompts, then all ranks exchange their groups.

    The coordinators of all ranks see the same groups in the same order, so they stay equal without communication.
    """

    coordinator: RolloutCoordinator[RolloutGroup]
    prompt: Callable[[int, int | None], Prompt]
    """Of a position, and of the record that a curriculum has drawn for it."""
    maker: PolicyExperienceMaker
    place: Place
    keep: Callable[[RolloutGroup], bool]
    success: Callable[[RolloutGroup], float | None] = lambda group: None
    """See `RolloutCoordinator.submit`."""

    def episode(self, index: int) -> MadeEpisode:
        """Make the episode, in as many waves as dynamic sampling needs."""
        while not self.coordinator.ready(index):
            leases = self.coordinator.lease("local", 1 << 30)
            if not leases:
                raise RlhfError(f"episode {index} cannot go on: {self.coordinator.progress(index)}", where="rollout")
            mine = leases[self.place.rank :: self.place.world_size]
            made = list(self.maker.make([self.prompt(lease.position, lease.record) for lease in mine]))
            gathered = [group for part in self.place.all_gather_objects(made) for group in part]
            for group in sorted(gathered, key=lambda g: g.position):
                keep = not group.is_empty and self.keep(group)
                self.coordinator.submit(group, keep=keep, success=self.success(group))
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
        return coordinator_to_tree(self.coordinator.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coordinator.load_state_dict(coordinator_from_tree(state))

    def close(self) -> None:
        """Do nothing: no resource is held."""


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
