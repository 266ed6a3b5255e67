"""`PolicyExperienceMaker`: sample, score, log-probs, values -> scored groups of samples.

All steps that need a forward pass or a reward happen here: tokens with the engine's log-probs, reference log-probs,
values, and raw rewards by name. The trainer does the arithmetic: combining rewards, KL penalty, advantages.
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
"""Sample id of the greedy answer to the prompt at position 0. Far from the ids of training samples."""
SCORED_TOGETHER = 64
"""Minimum number of samples that are sent to the rewards at once while later ones are generated."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """All samples of one prompt, sorted by sample id. The greedy answer, if there is one, comes last."""

    position: int
    samples: list[Played]
    rollouts: list[tuple[Rollout, ...]]
    """One rollout per row of each sample."""


_Scoring = tuple[list[_Finished], "Future[Scores]"]
"""Groups, and the scores of their samples that have rows."""


class PolicyExperienceMaker:
    """Makes complete prompt groups with a player, a scorer and, if needed, a reference and a critic."""

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
        """Create the maker of a process.

        Args:
            player: Samples the answers.
            samples_per_prompt: Answers per prompt.
            scorer: Scores the answers.
            hooks: Receive the start and end of making experience and scoring.
            passes: Add values such as reference log-probs. None without any.
            kl_coef: KL coefficient of the items. None if the trainer sets it.
            number: (prompt position, k) -> sample id. By default position * samples_per_prompt + k.
            greedy_player: Answers each prompt once more, greedily. That answer's rewards are stored in the group's
                items. None without greedy answers.
        """
        self._player = player
        self._greedy_player = greedy_player
        self._players = {"player": player} if greedy_player is None else {"player": player, "greedy": greedy_player}
        self._samples_per_prompt = samples_per_prompt
        self._scorer = scorer
        self._hooks = hooks
        self._passes = passes
        self._stateful = {**self._players, **{type(each).__name__: each for each in getattr(passes, "passes", ())}}
        self._kl_coef = kl_coef
        self._number = number or (lambda position, k: position * samples_per_prompt + k)
        self.times = PhaseTimes()

    def close(self) -> None:
        """Close the players and their resources, such as environment processes, but not the engine and rewards."""
        with ExitStack() as stack:
            for player in self._players.values():
                stack.callback(player.close)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of players and passes, without that of the rewards, which several makers may share."""
        return {name: state for name, state in state_of(self._stateful).items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the players and the passes."""
        load_state_of(self._stateful, state)

    def published(self, version: int) -> None:
        """Notify the passes that the trained models in this process have the weights of `version`."""
        if self._passes is not None:
            self._passes.published(version)

    def take_times(self) -> PhaseTimes:
        """Return the times and the costs of rewards since the last call."""
        taken = self.times.take()
        for player in self._players.values():
            taken.add(player.times.take())
        taken.add(PhaseTimes(reward_calls=self._scorer.take_metrics()))
        return taken

    def make(self, prompts: Sequence[Prompt]) -> Iterator[RolloutGroup]:
        """Yield the group of every prompt. A group is empty if all its samples were dropped."""
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
        """Generate all samples. Finished groups are scored while later ones are generated."""
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
        return groups, self._scorer.submit([rows[-1] for group in groups for rows in group.rollouts if rows])

    def _groups(self, finished: list[_Finished], scores: Scores) -> Iterator[RolloutGroup]:
        """Yield groups without samples that the failure policy of a reward or of the environment drops.

        If a greedy answer is dropped, all samples of its prompt are dropped, too.
        """
        remaining = iter(scores)
        for group in finished:
            sample_rewards = [next(remaining) if rows else None for rows in group.rollouts]
            samples = list(zip(group.samples, group.rollouts, sample_rewards, strict=True))
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
                pairs = zip(sample.rows, rows, strict=True)
                items += [item_of(row, each, of_sample, sample, self._kl_coef, greedy) for row, each in pairs]
            yield RolloutGroup(position=group.position, rollouts=tuple(rollouts), items=tuple(items))


def _finished(samples: list[Played]) -> _Finished:
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    rollouts = [tuple(rollout_of(row, sample) for row in sample.rows) for sample in ordered]
    return _Finished(ordered[0].prompt.position, ordered, rollouts)
