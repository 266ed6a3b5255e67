"""The section `eval` and, in it, `eval.sets`; which reward its score is the mean of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from ..util.did_you_mean import suggestion
from .load import OWN_REWARD
from .problems import Problem
from .section import Count, Section

if TYPE_CHECKING:
    from .resolved import ResolvedRun


class EvalSetOptions(Section):
    """How one set of held-out prompts is answered and judged."""

    num_prompts: int = Field(
        200,
        ge=0,
        description="Prompts scored: of `eval`, held out of training; of a set, its first ones. 0, the default where "
        "`eval.sets` has them all, holds none out.",
    )
    temperature: float = Field(0.0, ge=0, description="0 is greedy decoding; above 0 samples at that temperature.")
    samples_per_prompt: int = Field(
        0,
        ge=0,
        description="k sampled answers to each prompt beside the greedy one, as eval/avg@k, eval/pass@k, eval/maj@k.",
    )
    sampled_temperature: float | None = Field(
        None,
        gt=0,
        description="Temperature of sampled answers, scored as eval/sampled/…; null is the engine's, and none is "
        "sampled where samples_per_prompt is 0.",
    )
    max_new_tokens: Count | None = Field(None, description="Longest answer, in tokens; null is the engine's.")
    score: str | None = Field(
        None, description="Reward (its label) whose mean is the evaluation score; null takes the first."
    )
    passing_score: float = Field(1.0, description="Score from which an answer counts as right for pass@k.")

    @property
    def num_sampled(self) -> int:
        """Sampled answers to each prompt beside the greedy one."""
        return self.samples_per_prompt or int(self.sampled_temperature is not None)


class EvalConfig(EvalSetOptions):
    """Scoring held-out prompts before, during and after training."""

    every_episodes: Count | None = Field(
        10, description="Evaluate after every so many episodes; null only before the first and after the last."
    )
    batch_size: Count = Field(64, description="Answers generated at once.")
    prompts: dict[str, Any] | None = Field(
        None, description="A source of other prompts; null holds some of the run's prompts out."
    )
    sets: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Further sets by name, each with prompts and, where they differ, rewards and sampling.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sets_hold_none_out(cls, given: Any) -> Any:
        others = isinstance(given, dict) and given.get("sets") and not given.get("prompts")
        return {"num_prompts": 0, **given} if others else given

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        judged: list[tuple[str, str | None, Collection[str]]] = [("", self.score, run.reward_weights)]
        for each in run.eval_sets:
            judge = run if each.rewards is None else replace(run, rewards=each.rewards)
            judged.append((f"sets.{each.name}.", each.options.score, judge.reward_weights))
            if not judge.reward_weights:
                yield Problem(f"sets.{each.name}.rewards", "is empty: say how its answers are judged")
        for place, score, rewards in judged:
            if score is not None and score not in rewards:
                yield unknown_reward(f"{place}score", score, rewards)


def unknown_reward(path: str, label: str, rewards: Collection[str]) -> Problem:
    """The problem of an option that names a reward which the run does not have."""
    near = suggestion(label, rewards)
    return Problem(path, f'no reward "{label}" in this run{near} (rewards: {list(rewards)})')


def score_name(run: Mapping[str, Any]) -> str | None:
    """The label of the reward behind `eval/score` of a resolved run file; None where there is none."""
    evaluation, rewards = run.get("eval"), run.get("rewards")
    chosen = evaluation.get("score") if isinstance(evaluation, Mapping) else None
    if isinstance(chosen, str):
        return chosen
    if run.get(OWN_REWARD):
        return OWN_REWARD
    first = rewards[0] if isinstance(rewards, list | tuple) and rewards else None
    label = first.get("label") if isinstance(first, Mapping) else None
    return label if isinstance(label, str) else None
