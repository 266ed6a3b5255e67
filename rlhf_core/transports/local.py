"""Samples and trains in one process, or in the SPMD processes of a launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..algorithm import RolloutAlgorithm
from ..errors import RlhfError
from ..place import Place
from ..protocols import Sampler
from ..rewards.scorer import RewardScorer
from ..rollout.coordinator import RolloutCoordinator
from ..rollout.evaluate import PolicyEvaluator
from ..rollout.maker import PolicyExperienceMaker
from ..rollout.samples import collected_episode
from ..training.request import FitResult, RunRequest, Transport
from ..training.session import TrainerSession
from ..types import CollectedEpisode, Prompt, RolloutGroup
from ..wiring.models import build_strategy
from ..wiring.parts import TrainerParts

if TYPE_CHECKING:
    from .plugin import LocalConfig


def build(config: LocalConfig, context: None) -> Transport:
    """Return the transport of `transport: {name: local}`."""
    return LocalTransport()


class LocalTransport:
    """Every rank has its part of the trainer, an engine, and the rewards."""

    def run(self, request: RunRequest) -> FitResult:
        strategy = build_strategy(request.resolved)
        with ExitStack() as stack:
            stack.callback(strategy.teardown)
            strategy.setup()
            run = stack.enter_context(closing(TrainerParts(request.inputs, strategy, run_folder=request.folder.path)))
            generates = run.resolved.generates
            session = TrainerSession(
                run,
                request.folder,
                hooks=request.hooks,
                publish=run.publish if generates else lambda version: None,
                makers=LocalChannel.of(request, run) if generates else None,
                interrupted=request.interrupted,
            )
            return session.fit(request.resume)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChannel:
    """Every rank makes its share of an episode's prompts, then all ranks exchange their groups.

    The coordinators of all ranks see the same groups in the same order, so they stay equal without communication.
    """

    place: Place
    scorer: RewardScorer
    evaluator: PolicyEvaluator | None = None
    maker: PolicyExperienceMaker | None = None
    """This and the following fields are for an algorithm that learns from rollouts."""
    coordinator: RolloutCoordinator[RolloutGroup]
    prompt: Callable[[int, int | None], Prompt]
    """Function of a position and of the record that a sampler drew for it (None without a sampler)."""
    keep: Callable[[RolloutGroup], bool] = lambda group: True
    sampler: Sampler | None = None
    """Judges the groups. The coordinator draws records from it."""

    @classmethod
    def of(cls, request: RunRequest, run: TrainerParts) -> LocalChannel:
        """Return the channel of this rank's parts. Some parts are built here."""
        algorithm, train = run.inputs.algorithm, run.resolved.run.train
        rolls_out = isinstance(algorithm, RolloutAlgorithm)
        sampler = run.inputs.sampler() if rolls_out else None
        return cls(
            place=run.place,
            scorer=run.scorer,
            maker=run.maker(request.hooks) if rolls_out else None,
            coordinator=RolloutCoordinator(
                num_episodes=train.episodes, prompts_per_episode=train.prompts_per_episode, sampler=sampler
            ),
            prompt=run.inputs.prompts.prompt,
            keep=algorithm.keep if isinstance(algorithm, RolloutAlgorithm) else lambda group: True,
            sampler=sampler,
            evaluator=run.evaluator,
        )

    def episode(self, index: int) -> CollectedEpisode:
        """Make the episode, in as many waves as dynamic sampling needs."""
        assert self.maker is not None
        while not self.coordinator.ready(index):
            leases = self.coordinator.lease(1 << 30)
            if not leases:
                raise RlhfError(f"episode {index} cannot continue: {self.coordinator.progress(index)}", where="rollout")
            mine = leases[self.place.rank :: self.place.world_size]
            groups = list(self.maker.make([self.prompt(lease.position, lease.record) for lease in mine]))
            gathered = [group for part in self.place.all_gather_objects(groups) for group in part]
            for group in sorted(gathered, key=lambda g: g.position):
                keep = not group.is_empty and self.keep(group)
                success = None if self.sampler is None else self.sampler.judge(group)
                self.coordinator.submit(group, keep=keep, success=success)
        groups = self.coordinator.take(index)
        return collected_episode(
            [item for group in groups for item in group.items],
            self.maker.take_times(),
            rollouts=[rollout for group in groups for rollout in group.rollouts],
            metrics=self.coordinator.take_metrics(),
        )

    def published(self, version: int) -> None:
        self.coordinator.publish(version)
        if self.maker is not None:
            self.maker.published(version)

    def evaluate(self) -> Mapping[str, float]:
        return {} if self.evaluator is None else self.evaluator.evaluate()

    def state_dict(self) -> dict[str, Any]:
        """Return the coordinator's state. It lacks groups, since all of them are taken between two episodes."""
        return self.coordinator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Finished groups of a transport that samples ahead of training are sampled again."""
        self.coordinator.load_state_dict(
            {**state, "open": {index: _reopen(saved) for index, saved in state["open"].items()}}
        )

    def states(self) -> list[dict[str, Any]]:
        """Return the state of all ranks' rewards and players."""
        parts = {"rewards": self.scorer.state_dict(), "players": {} if self.maker is None else self.maker.state_dict()}
        states = self.place.all_gather_objects({name: part for name, part in parts.items() if part})
        return states if any(states) else []

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state of this rank. After a resume with more ranks, some start from the same state."""
        state = states[self.place.rank % len(states)]
        self.scorer.load_state_dict(state.get("rewards", {}))
        if self.maker is not None:
            self.maker.load_state_dict(state.get("players", {}))


def _reopen(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an open episode with its finished groups marked as outstanding."""
    positions = [group["position"] for group in episode["accepted"]]
    outcomes = {**dict.fromkeys(map(str, positions)), **episode.get("outcomes", {})}
    outstanding = sorted([*episode["outstanding"], *positions])
    return {**episode, "accepted": [], "outstanding": outstanding, "outcomes": outcomes}
