"""`PolicyExperienceMaker`: sample, score, log-probs, values -> scored groups of samples.

What needs a model forward happens here: tokens with the engine's log-probs, reference log-probs, values, raw rewards
by name. What is arithmetic (combining rewards, KL penalty, advantages) is the trainer's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..hooks.relay import HookRelay
from ..rewards.scorer import RewardScorer, Scores
from ..types import BufferItem, PhaseTimes, Prompt, Rollout, RolloutGroup
from ..util.kept_state import load_state_of, state_of
from .player import TimedPlayer
from .row import Played
from .samples import SampleRewards, item_of, rollout_of

if TYPE_CHECKING:
    from ..models.passes import GroupPasses

GREEDY_SAMPLE_ID = 1 << 61
"""The greedy answer to the prompt at a position has this id more, far from the ids of training samples."""
SCORED_TOGETHER = 64
"""Samples handed to the rewards at a time while later ones are still generated."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """All samples of one prompt, by sample id; its greedy answer, where one is made, is the last."""

    position: int
    samples: list[Played]
    rollouts: list[tuple[Rollout, ...]]
    """One a row of each sample."""


_Scoring = tuple[list[_Finished], "Future[Scores]"]
"""Groups, and a score for each of their samples that has rows."""


class PolicyExperienceMaker:
    """Makes whole prompt groups with one player, one scorer and, where needed, a reference and a critic.

    `number(prompt position, k)` numbers samples; the seed classes bring their own numbering.
    """

    def __init__(
        self,
        *,
        player: TimedPlayer,
        samples_per_prompt: int,
        scorer: RewardScorer,
        hooks: HookRelay,
        passes: GroupPasses | None = None,
        kl_coef: float | None = None,
        number: Callable[[int, int], int] | None = None,
        greedy_player: TimedPlayer | None = None,
    ) -> None:
        """greedy_player: answers each prompt once more, greedily; that answer's rewards go with the group's items."""
        self._player = player
        self._greedy_player = greedy_player
        self._players = {"player": player} if greedy_player is None else {"player": player, "greedy": greedy_player}
        self._samples_per_prompt = samples_per_prompt
        self._scorer = scorer
        self._hooks = hooks
        self._passes = passes
        self._kl_coef = kl_coef
        self._number = number or (lambda position, k: position * samples_per_prompt + k)
        self.times = PhaseTimes()

    def close(self) -> None:
        """End what the players keep, such as a process of environments. Engine and rewards are not its own."""
        with ExitStack() as stack:
            for player in self._players.values():
                stack.callback(player.close)

    def state_dict(self) -> dict[str, Any]:
        """State of the players; empty if they keep none. The rewards' is not part of it: makers may share them."""
        return {name: state for name, state in state_of(self._players).items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the players back what they kept."""
        load_state_of(self._players, state)

    def published(self, version: int) -> None:
        """The models here that are trained have the weights of `version`."""
        if self._passes is not None:
            self._passes.published(version)

    def take_times(self) -> PhaseTimes:
        """The times since the last call, and what the rewards cost meanwhile."""
        taken = self.times.take()
        for player in self._players.values():
            taken.add(player.times.take())
        taken.reward_calls = self._scorer.take_metrics()
        return taken

    def make(self, prompts: Sequence[Prompt]) -> Iterator[RolloutGroup]:
        """Yield every prompt's group. A group all of whose samples were dropped comes back empty."""
        num_samples = len(prompts) * self._samples_per_prompt
        with self._hooks.span("make_experience", num_prompts=len(prompts), num_samples=num_samples) as span:
            scoring = self._generate(prompts)
            started = time.perf_counter()
            with self._hooks.span("reward", num_samples=num_samples):
                scored = [(part, scores.result()) for part, scores in scoring]
            self.times.reward_s += time.perf_counter() - started
            groups = [group for part, scores in scored for group in self._groups(part, scores)]
            started = time.perf_counter()
            if self._passes is not None:
                groups = self._passes.run(groups)
            self.times.forward_s += time.perf_counter() - started
            span.set("groups", groups)
        yield from groups

    def _generate(self, prompts: Sequence[Prompt]) -> list[_Scoring]:
        """Generate all samples; finished groups go to the rewards while later ones are still generated."""
        samples = [(p, self._number(p.position, k)) for p in prompts for k in range(self._samples_per_prompt)]
        arrived: dict[int, list[Played]] = defaultdict(list)
        finished: list[_Finished] = []
        scoring: list[_Scoring] = []
        for played in self._play(prompts, samples):
            group = arrived[played.prompt.position]
            group.append(played)
            if len(group) == self._samples_per_prompt + (self._greedy_player is not None):
                finished.append(_finished(arrived.pop(played.prompt.position)))
            if len(finished) * self._samples_per_prompt >= SCORED_TOGETHER:
                scoring.append(self._submit(finished))
                finished = []
        if finished:
            scoring.append(self._submit(finished))
        return scoring

    def _play(self, prompts: Sequence[Prompt], samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        if self._greedy_player is not None:
            yield from self._greedy_player.play([(p, GREEDY_SAMPLE_ID + p.position) for p in prompts])
        yield from self._player.play(samples)

    def _submit(self, groups: list[_Finished]) -> _Scoring:
        judged = [rows[-1] for group in groups for rows in group.rollouts if rows]
        return groups, self._scorer.submit(judged)

    def _groups(self, finished: list[_Finished], scores: Scores) -> Iterator[RolloutGroup]:
        """Rollouts with their items; samples that a reward's or the environment's policy drops are left out.

        So are all samples of a prompt whose greedy answer is dropped.
        """
        found = iter(scores)
        for group in finished:
            rewarded = [next(found) if rows else None for rows in group.rollouts]
            samples = list(zip(group.samples, group.rollouts, rewarded, strict=True))
            greedy = None
            if self._greedy_player is not None:
                sample, _, rewards = samples.pop()
                greedy = None if rewards is None else SampleRewards.of(sample, rewards).scores
                samples = [] if greedy is None else samples
            rollouts: list[Rollout] = []
            items: list[BufferItem] = []
            for sample, rows, rewards in samples:
                if rewards is None:
                    continue
                rollouts += rows
                of_sample = SampleRewards.of(sample, rewards)
                items += [
                    item_of(row, rollout, of_sample, sample, self._kl_coef, greedy)
                    for row, rollout in zip(sample.rows, rows, strict=True)
                ]
            yield RolloutGroup(position=group.position, rollouts=tuple(rollouts), items=tuple(items))


def _finished(samples: list[Played]) -> _Finished:
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    rollouts = [tuple(rollout_of(row, sample) for row in sample.rows) for sample in ordered]
    return _Finished(ordered[0].prompt.position, ordered, rollouts)
