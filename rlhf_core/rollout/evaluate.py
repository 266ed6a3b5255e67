"""Scoring a policy on held-out prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ..config.sections import EvalSetOptions
from ..hooks.relay import HookRelay
from ..place import Place
from ..rewards.scorer import RewardScorer
from ..types import BufferItem, Prompt, RolloutGroup, SamplingParams
from .episode_metrics import ENVIRONMENT
from .eval_metrics import EvaluationRow, evaluation_metrics, final_answer
from .maker import PolicyExperienceMaker
from .player import TimedPlayer

FIRST_SAMPLE_ID = 1 << 62
"""Evaluation draws from noise of its own, far from the ids of training samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    """One set of prompts: a greedy answer to each and, as its options say, sampled ones beside it."""

    name: str | None = None
    options: EvalSetOptions
    prompts: Sequence[Prompt]
    scorer: RewardScorer


class PolicyEvaluator:
    """Evaluates one set of prompts after the other. Collective: the ranks share the prompts."""

    def __init__(
        self,
        sets: Sequence[EvaluatedSet],
        *,
        player: Callable[[SamplingParams], TimedPlayer],
        sampling: SamplingParams,
        batch_size: int,
        place: Place,
    ) -> None:
        """player: has the policy answer, sampled in the given way. sampling: the run's; temperatures and, where it has
        one, the length limit are a set's own. batch_size: answers at once.
        """
        self._batch_size = batch_size
        self._place = place
        self._about = [(each.name, each.options) for each in sets]
        prompts = [(index, prompt) for index, each in enumerate(sets) for prompt in each.prompts]
        numbered = [(index, replace(prompt, position=i)) for i, (index, prompt) in enumerate(prompts)]
        self._prompts = numbered[place.rank :: place.world_size]
        self._makers: list[tuple[int, bool, int, PolicyExperienceMaker]] = []
        """Number of a set, whether its answers are the sampled ones, how many a prompt has, and who makes them."""
        for index, each in enumerate(sets):
            options = each.options
            own = replace(sampling, max_new_tokens=options.max_new_tokens or sampling.max_new_tokens)
            ways = [(False, 1, options.temperature)]
            if options.num_sampled:
                ways.append((True, options.num_sampled, options.sampled_temperature or sampling.temperature))
            for sampled, count, temperature in ways:
                maker = PolicyExperienceMaker(
                    player=player(at_temperature(own, temperature)),
                    samples_per_prompt=count,
                    scorer=each.scorer,
                    hooks=HookRelay(),
                    number=partial(_number, count),
                )
                self._makers.append((index, sampled, count, maker))

    @property
    def num_prompts(self) -> int:
        """Prompts of all sets that this rank evaluates."""
        return len(self._prompts)

    def close(self) -> None:
        """Close the players."""
        with ExitStack() as stack:
            for _, _, _, maker in self._makers:
                stack.callback(maker.close)

    def evaluate(self) -> dict[str, float]:
        """The metrics of `evaluation_metrics` over all prompts."""
        gathered = self._place.all_gather_objects(self.rows(0, len(self._prompts)))
        return evaluation_metrics([row for part in gathered for row in part], self._about)

    def rows(self, start: int, stop: int) -> list[EvaluationRow]:
        """Answer and score this rank's prompts `start` to `stop`."""
        rows: list[EvaluationRow] = []
        for index, sampled, count, maker in self._makers:
            prompts = [prompt for of, prompt in self._prompts[start:stop] if of == index]
            at_once = max(1, self._batch_size // count)
            for first in range(0, len(prompts), at_once):
                for group in maker.make(prompts[first : first + at_once]):
                    rows += _rows(group, count, sampled, index)
            if prompts:
                maker.take_times()  # what an evaluation costs is not the next episode's
        return rows


def _number(count: int, position: int, k: int) -> int:
    return FIRST_SAMPLE_ID + position * count + k


def at_temperature(sampling: SamplingParams, temperature: float) -> SamplingParams:
    """The run's way of sampling at another temperature; 0 is greedy."""
    if temperature == 0:
        return replace(sampling, greedy=True, temperature=1.0, top_k=0, top_p=1.0)
    return replace(sampling, greedy=False, temperature=temperature)


def _rows(group: RolloutGroup, count: int, sampled: bool, set_index: int) -> Iterator[EvaluationRow]:
    """One a sample, those that were dropped included: an answer, or an episode with all its branches."""
    branches: dict[int, list[BufferItem]] = defaultdict(list)
    for item in group.items:
        branches[item.sample_id].append(item)
    answers = {rollout.sample_id: final_answer(rollout.completion) for rollout in group.rollouts}
    for number in (_number(count, group.position, k) for k in range(count)):
        items = branches.get(number, [])
        yield EvaluationRow(
            rewards=dict(items[0].rewards) if items else {},
            num_tokens=sum(item.num_sampled_tokens for item in items),
            truncated=bool(items) and items[-1].truncated,
            sampled=sampled,
            prompt=group.position,
            answer=answers.get(number, ""),
            set_index=set_index,
            environment=items[0].columns.get(ENVIRONMENT, {}) if items else {},
        )
