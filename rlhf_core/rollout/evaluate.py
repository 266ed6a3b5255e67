"""Evaluation of a policy on held-out prompts."""

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
"""First sample id of evaluations. Far from the ids of training samples, so that the sampling noise is separate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    """One set of prompts, each with a greedy answer and, depending on the options, several sampled ones."""

    name: str | None = None
    options: EvalSetOptions
    prompts: Sequence[Prompt]
    scorer: RewardScorer


class PolicyEvaluator:
    """Evaluates several sets of prompts, one after the other. Collective: ranks share the prompts."""

    def __init__(
        self,
        sets: Sequence[EvaluatedSet],
        *,
        player: Callable[[SamplingParams], TimedPlayer],
        sampling: SamplingParams,
        batch_size: int,
        place: Place,
    ) -> None:
        """Create the makers of all sets.

        Args:
            sets: The sets to evaluate.
            player: Builds a player that answers prompts with the given sampling parameters.
            sampling: Parameters of the run. The options of a set override the temperature and length limit.
            batch_size: Maximum number of answers generated at once.
            place: Ranks that share the prompts.
        """
        self._batch_size = batch_size
        self._place = place
        self._sets = [(each.name, each.options) for each in sets]
        prompts = [(index, prompt) for index, each in enumerate(sets) for prompt in each.prompts]
        numbered = [(index, replace(prompt, position=i)) for i, (index, prompt) in enumerate(prompts)]
        self._prompts = numbered[place.rank :: place.world_size]
        self._makers: list[tuple[int, bool, int, PolicyExperienceMaker]] = []
        """Index of a set, whether its answers are sampled (not greedy), answers per prompt, and the maker."""
        for index, each in enumerate(sets):
            options = each.options
            own = replace(sampling, max_new_tokens=options.max_new_tokens or sampling.max_new_tokens)
            modes = [(False, 1, options.temperature)]
            if options.num_sampled:
                modes.append((True, options.num_sampled, options.sampled_temperature or sampling.temperature))
            for sampled, count, temperature in modes:
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
        """Number of prompts of all sets that this rank evaluates."""
        return len(self._prompts)

    def close(self) -> None:
        """Close the players."""
        with ExitStack() as stack:
            for _, _, _, maker in self._makers:
                stack.callback(maker.close)

    def evaluate(self) -> dict[str, float]:
        """Return `evaluation_metrics` over all prompts. Collective."""
        gathered = self._place.all_gather_objects(self.rows(0, len(self._prompts)))
        return evaluation_metrics([row for part in gathered for row in part], self._sets)

    def rows(self, start: int, stop: int) -> list[EvaluationRow]:
        """Answer and score this rank's prompts `start` up to and excluding `stop`."""
        rows: list[EvaluationRow] = []
        for index, sampled, count, maker in self._makers:
            prompts = [prompt for set_index, prompt in self._prompts[start:stop] if set_index == index]
            size = max(1, self._batch_size // count)
            for first in range(0, len(prompts), size):
                for group in maker.make(prompts[first : first + size]):
                    rows += _rows(group, count, sampled, index)
            if prompts:
                maker.take_times()  # the cost of an evaluation must not count for the next episode
        return rows


def _number(count: int, position: int, k: int) -> int:
    return FIRST_SAMPLE_ID + position * count + k


def at_temperature(sampling: SamplingParams, temperature: float) -> SamplingParams:
    """Return the sampling parameters with another temperature. 0 is greedy."""
    if temperature == 0:
        return replace(sampling, greedy=True, temperature=1.0, top_k=0, top_p=1.0)
    return replace(sampling, greedy=False, temperature=temperature)


def _rows(group: RolloutGroup, count: int, sampled: bool, set_index: int) -> Iterator[EvaluationRow]:
    """Yield one row per sample (an answer, or an episode with all its branches), including dropped samples."""
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
