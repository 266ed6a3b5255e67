"""Scoring a policy on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .hooks import HookRelay
from .maker import PolicyExperienceMaker
from .protocols import RolloutEngine
from .rewards import RewardScorer
from .strategy import Strategy
from .types import Prompt, SamplingParams

FIRST_SAMPLE_ID = 1 << 62
"""Evaluation draws from noise of its own, far from the ids of training samples."""


class PolicyEvaluator:
    """Mean rewards of one answer to each held-out prompt. Collective: the ranks share the prompts."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        tokenizer: object,
        scorer: RewardScorer,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        temperature: float,
        score: str | None,
        batch_size: int,
        strategy: Strategy,
    ) -> None:
        greedy = temperature == 0
        self._prompts = [replace(p, position=i) for i, p in enumerate(prompts)][strategy.rank :: strategy.world_size]
        self._batch_size = batch_size
        self._score = score
        self._strategy = strategy
        self._maker = PolicyExperienceMaker(
            engine=engine,
            tokenizer=tokenizer,
            sampling=replace(
                sampling,
                greedy=greedy,
                temperature=1.0 if greedy else temperature,
                top_k=0 if greedy else sampling.top_k,
                top_p=1.0 if greedy else sampling.top_p,
            ),
            samples_per_prompt=1,
            scorer=scorer,
            hooks=HookRelay(),
            number=lambda position, _: FIRST_SAMPLE_ID + position,
        )

    def evaluate(self) -> dict[str, float]:
        """`eval/<reward>` means, `eval/score` (the first reward or the named one), `eval/length_mean`, counts.

        A sample that a reward's policy drops counts as 0, so that a failing scorer never makes a policy look better.
        """
        rows: list[tuple[dict[str, float], int, bool]] = []
        for start in range(0, len(self._prompts), self._batch_size):
            for group in self._maker.make(self._prompts[start : start + self._batch_size]):
                for item in group.items:
                    rows.append((dict(item.rewards), item.num_response_tokens, item.truncated))
        gathered = self._strategy.all_gather_objects((len(self._prompts), rows))
        total = sum(count for count, _ in gathered)
        everything = [row for _, part in gathered for row in part]
        if not everything:
            return {}
        names = list(everything[0][0])
        metrics = {f"eval/{name}": math.fsum(row[0][name] for row in everything) / total for name in names}
        metrics["eval/score"] = metrics[f"eval/{self._score or names[0]}"]
        metrics["eval/length_mean"] = sum(row[1] for row in everything) / len(everything)
        metrics["eval/truncated_fraction"] = sum(row[2] for row in everything) / len(everything)
        metrics["eval/num_prompts"] = float(total)
        return metrics
