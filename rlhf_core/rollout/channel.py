"""The in-process experience channel: the trainer's own process makes its rollouts, every rank its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config.sections import CurriculumConfig
from ..errors import RlhfError
from ..rewards.scorer import RewardScorer
from ..strategy import Strategy
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


class LocalChannel:
    """Every rank makes its share of an episode's prompts, then all ranks exchange their groups.

    The coordinators of all ranks see the same groups in the same order, so they stay equal without communication.
    """

    def __init__(
        self,
        *,
        coordinator: RolloutCoordinator[RolloutGroup],
        prompt: Callable[[int, int | None], Prompt],
        maker: PolicyExperienceMaker,
        strategy: Strategy,
        keep: Callable[[RolloutGroup], bool],
        success: Callable[[RolloutGroup], float | None] = lambda group: None,
    ) -> None:
        """prompt: of a position, and of the record that a curriculum has drawn for it. success: see
        `RolloutCoordinator.submit`.
        """
        self._coordinator = coordinator
        self._prompt = prompt
        self._maker = maker
        self._strategy = strategy
        self._keep = keep
        self._success = success

    def episode(self, index: int) -> MadeEpisode:
        """Make the episode, in as many waves as dynamic sampling needs."""
        while not self._coordinator.ready(index):
            leases = self._coordinator.lease("local", 1 << 30)
            if not leases:
                raise RlhfError(f"episode {index} cannot go on: {self._coordinator.progress(index)}", where="rollout")
            mine = leases[self._strategy.rank :: self._strategy.world_size]
            made = list(self._maker.make([self._prompt(lease.position, lease.record) for lease in mine]))
            gathered = [group for part in self._strategy.all_gather_objects(made) for group in part]
            for group in sorted(gathered, key=lambda g: g.position):
                keep = not group.is_empty and self._keep(group)
                self._coordinator.submit(group, keep=keep, success=self._success(group))
        groups = self._coordinator.take(index)
        return made_episode(
            [item for group in groups for item in group.items],
            self._maker.take_times(),
            rollouts=[rollout for group in groups for rollout in group.rollouts],
            metrics=self._coordinator.take_metrics(),
        )

    def published(self, version: int) -> None:
        self._coordinator.publish(version)

    def state_dict(self) -> dict[str, Any]:
        return coordinator_to_tree(self._coordinator.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coordinator.load_state_dict(coordinator_from_tree(state))

    def close(self) -> None:
        """Do nothing: no resource is held."""


class RankedRewardStates:
    """The states of all ranks' rewards. After a resume with another number of ranks, some start from the same one."""

    def __init__(self, scorer: RewardScorer, strategy: Strategy) -> None:
        self._scorer = scorer
        self._strategy = strategy

    def states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self._strategy.all_gather_objects(self._scorer.state_dict())
        return states if any(states) else []

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._scorer.load_state_dict(states[self._strategy.rank % len(states)])
