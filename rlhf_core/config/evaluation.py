"""The section `eval` and, in it, `eval.sets`; which reward its score is the mean of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator, model_validator

from ..util.did_you_mean import suggestion
from .load import OWN_REWARD
from .problems import Problem
from .section import Count, Section

if TYPE_CHECKING:
    from .resolved import ResolvedRun


_SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_RESERVED_SET_NAMES = ("sampled", "loss")


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


class EvalSet(EvalSetOptions):
    """One entry of `eval.sets`."""

    prompts: dict[str, Any] = Field(default_factory=dict, description="The source of its prompts.")
    rewards: list[Any] | None = Field(None, description="What judges its answers; null: the rewards of the run.")


class EvalConfig(EvalSetOptions):
    """Scoring held-out prompts before, during and after training."""

    every_episodes: Count | None = Field(
        10, description="Evaluate after every so many episodes; null only before the first and after the last."
    )
    batch_size: Count = Field(64, description="Answers generated at once.")
    prompts: dict[str, Any] | None = Field(
        None, description="A source of other prompts; null holds some of the run's prompts out."
    )
    sets: dict[str, EvalSet] = Field(
        default_factory=dict,
        description="Further sets by name, each with prompts and, where they differ, rewards and sampling.",
    )

    @field_validator("sets")
    @classmethod
    def _names_of_metrics(cls, sets: dict[str, EvalSet]) -> dict[str, EvalSet]:
        for name in sets:
            if not _SET_NAME.fullmatch(name) or name in _RESERVED_SET_NAMES:
                reserved = ", ".join(_RESERVED_SET_NAMES)
                raise ValueError(f"{name!r}: a set's name has letters, digits, . _ and -, and is none of {reserved}")
        return sets

    @model_validator(mode="after")
    def _as_in_eval(self) -> Self:
        """What a set does not say of sampling is as here; a run with sets holds no prompts out unless it says so."""
        if not self.sets:
            return self
        shared = self.model_fields_set & EvalSetOptions.model_fields.keys() - {"num_prompts"}
        update: dict[str, Any] = {"sets": {}}
        if not self.prompts and "num_prompts" not in self.model_fields_set:
            update["num_prompts"] = 0
        for name, each in self.sets.items():
            inherited = shared - each.model_fields_set - ({"score"} if each.rewards is not None else set())
            update["sets"][name] = each.model_copy(update={key: getattr(self, key) for key in inherited})
        return self.model_copy(update=update)

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        judged = {"": (self.score, run.rewards)}
        for name, each in self.sets.items():
            judged[f"sets.{name}."] = each.score, run.eval_rewards.get(name, run.rewards)
        for place, (score, rewards) in judged.items():
            weights = replace(run, rewards=rewards).reward_weights
            if place and not weights:
                yield Problem(f"{place}rewards", "is empty: say how its answers are judged")
            if score is not None and score not in weights:
                near = suggestion(score, weights)
                told = f'no reward "{score}" in this run{near} (rewards: {list(weights)})'
                yield Problem(f"{place}score", told)


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
