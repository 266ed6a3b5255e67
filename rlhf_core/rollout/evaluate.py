"""Scoring a policy on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ..hooks.relay import HookRelay
from ..rewards.scorer import RewardScorer
from ..types import BufferItem, Prompt, SamplingParams
from .maker import Player, PolicyExperienceMaker

FIRST_SAMPLE_ID = 1 << 62
"""Evaluation draws from noise of its own, far from the ids of training samples."""


class Ranks(Protocol):
    """The part of a `Strategy` that says how the prompts are shared."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather_objects(self, value: Any) -> list[Any]: ...


class PolicyEvaluator:
    """Mean rewards of one answer to each held-out prompt, or of a greedy and a sampled one. Collective: the ranks
    share the prompts."""

    def __init__(
        self,
        *,
        player: Callable[[SamplingParams], Player],
        scorer: RewardScorer,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        temperature: float,
        score: str | None,
        batch_size: int,
        strategy: Ranks,
        sampled_temperature: float | None = None,
    ) -> None:
        """player: has the policy answer, sampled in the given way. `temperature` 0 is greedy; `sampled_temperature`
        asks for a second answer, sampled at it."""
        self._prompts = [replace(p, position=i) for i, p in enumerate(prompts)][strategy.rank :: strategy.world_size]
        self._batch_size = batch_size
        self._score = score
        self._strategy = strategy

        def maker(at: float) -> PolicyExperienceMaker:
            return PolicyExperienceMaker(
                player=player(_at_temperature(sampling, at)),
                samples_per_prompt=1,
                scorer=scorer,
                hooks=HookRelay(),
                number=lambda position, _: FIRST_SAMPLE_ID + position,
            )

        self._makers = {False: maker(temperature)}
        if sampled_temperature is not None:
            self._makers[True] = maker(sampled_temperature)

    @property
    def num_prompts(self) -> int:
        """Of this rank."""
        return len(self._prompts)

    def close(self) -> None:
        """Close the players."""
        for maker in self._makers.values():
            maker.close()

    def evaluate(self) -> dict[str, float]:
        """The metrics of `evaluation_metrics` over all prompts."""
        gathered = self._strategy.all_gather_objects((len(self._prompts), self.rows(0, len(self._prompts))))
        return evaluation_metrics(
            [row for _, part in gathered for row in part], sum(count for count, _ in gathered), self._score
        )

    def rows(self, start: int, stop: int) -> list[EvaluationRow]:
        """Answer and score this rank's prompts `start` to `stop`."""
        rows: list[EvaluationRow] = []
        for sampled, maker in self._makers.items():
            for first in range(start, stop, self._batch_size):
                made = maker.make(self._prompts[first : min(first + self._batch_size, stop)])
                rows += [EvaluationRow.of(group.items, sampled) for group in made if group.items]
            maker.take_times()  # what an evaluation costs is not the next episode's
        return rows


def _at_temperature(sampling: SamplingParams, temperature: float) -> SamplingParams:
    """The run's way of sampling at another temperature; 0 is greedy."""
    if temperature == 0:
        return replace(sampling, greedy=True, temperature=1.0, top_k=0, top_p=1.0)
    return replace(sampling, greedy=False, temperature=temperature)


class EvaluationRow(NamedTuple):
    """What one answer, or one episode, adds to an evaluation."""

    rewards: dict[str, float]
    num_tokens: int
    truncated: bool
    sampled: bool = False
    """The second answer, of `sampled_temperature`."""

    @classmethod
    def of(cls, items: Sequence[BufferItem], sampled: bool) -> EvaluationRow:
        """An answer or an episode with all its branches, whose rewards are the episode's."""
        tokens = sum(item.num_sampled_tokens for item in items)
        return cls(dict(items[0].rewards), tokens, items[-1].truncated, sampled)


def evaluation_metrics(rows: Sequence[EvaluationRow], num_prompts: int, score: str | None) -> dict[str, float]:
    """`eval/<reward>` means, `eval/score` (the first reward or the one named `score`), `eval/length_mean`, counts.

    Of sampled second answers the same under `eval/sampled/…`.
    A sample that a reward's policy drops counts as 0, so that a failing scorer never makes a policy look better.
    """
    first = _means([row for row in rows if not row.sampled], num_prompts, score, "eval")
    return first | _means([row for row in rows if row.sampled], num_prompts, score, "eval/sampled")


def _means(rows: Sequence[EvaluationRow], num_prompts: int, score: str | None, prefix: str) -> dict[str, float]:
    if not rows:
        return {}
    names = list(rows[0].rewards)
    metrics = {f"{prefix}/{name}": math.fsum(row.rewards[name] for row in rows) / num_prompts for name in names}
    metrics[f"{prefix}/score"] = metrics[f"{prefix}/{score or names[0]}"]
    metrics[f"{prefix}/length_mean"] = sum(row.num_tokens for row in rows) / len(rows)
    metrics[f"{prefix}/truncated_fraction"] = sum(row.truncated for row in rows) / len(rows)
    metrics[f"{prefix}/num_prompts"] = float(num_prompts)
    return metrics
