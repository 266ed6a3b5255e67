"""Scoring a policy on held-out prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

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


class EvaluatedSet:
    """One set of prompts: a greedy answer to each and, as its options say, sampled ones beside it."""

    def __init__(
        self,
        *,
        player: Callable[[SamplingParams], TimedPlayer],
        scorer: RewardScorer,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        options: EvalSetOptions,
        name: str | None = None,
    ) -> None:
        """player: has the policy answer, sampled in the given way. sampling: the run's; temperatures and, where it
        has one, the length limit are those of `options`.
        """
        self.prompts = prompts
        self.about = name, options
        if options.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=options.max_new_tokens)
        self._makers = {False: (_maker(player, scorer, at_temperature(sampling, options.temperature), 1), 1)}
        if count := options.num_sampled:
            at = sampling.temperature if options.sampled_temperature is None else options.sampled_temperature
            self._makers[True] = (_maker(player, scorer, at_temperature(sampling, at), count), count)

    def rows(self, prompts: Sequence[Prompt], set_index: int, batch_size: int) -> list[EvaluationRow]:
        """Answer and score some of the set's prompts, `batch_size` answers at once."""
        rows: list[EvaluationRow] = []
        for sampled, (maker, count) in self._makers.items():
            at_once = max(1, batch_size // count)
            for first in range(0, len(prompts), at_once):
                for group in maker.make(prompts[first : first + at_once]):
                    rows += _rows(group, count, sampled, set_index)
            maker.take_times()  # what an evaluation costs is not the next episode's
        return rows

    def close(self) -> None:
        """Close the players."""
        with ExitStack() as stack:
            for maker, _ in self._makers.values():
                stack.callback(maker.close)


class PolicyEvaluator:
    """Evaluates one set of prompts after the other. Collective: the ranks share the prompts."""

    def __init__(self, sets: Sequence[EvaluatedSet], *, batch_size: int, place: Place) -> None:
        self._sets = sets
        self._batch_size = batch_size
        self._place = place
        prompts = [(index, prompt) for index, each in enumerate(sets) for prompt in each.prompts]
        numbered = [(index, replace(prompt, position=i)) for i, (index, prompt) in enumerate(prompts)]
        self._prompts = numbered[place.rank :: place.world_size]

    @property
    def num_prompts(self) -> int:
        """Prompts of all sets that this rank evaluates."""
        return len(self._prompts)

    def close(self) -> None:
        """Close the players of the sets."""
        with ExitStack() as stack:
            for each in self._sets:
                stack.callback(each.close)

    def evaluate(self) -> dict[str, float]:
        """The metrics of `evaluation_metrics` over all prompts."""
        gathered = self._place.all_gather_objects(self.rows(0, len(self._prompts)))
        return evaluation_metrics([row for part in gathered for row in part], [each.about for each in self._sets])

    def rows(self, start: int, stop: int) -> list[EvaluationRow]:
        """Answer and score this rank's prompts `start` to `stop`."""
        rows: list[EvaluationRow] = []
        for index, each in enumerate(self._sets):
            prompts = [prompt for of, prompt in self._prompts[start:stop] if of == index]
            rows += each.rows(prompts, index, self._batch_size) if prompts else []
        return rows


def _maker(
    player: Callable[[SamplingParams], TimedPlayer], scorer: RewardScorer, sampling: SamplingParams, count: int
) -> PolicyExperienceMaker:
    return PolicyExperienceMaker(
        player=player(sampling),
        samples_per_prompt=count,
        scorer=scorer,
        hooks=HookRelay(),
        number=lambda position, k: FIRST_SAMPLE_ID + position * count + k,
    )


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
    first = FIRST_SAMPLE_ID + group.position * count
    for number in range(first, first + count):
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
