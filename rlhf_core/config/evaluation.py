"""The sections `eval` and `eval.sets`, and the reward whose mean is the evaluation score."""

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
    """How a set of held-out prompts is answered and judged."""

    num_prompts: int = Field(
        200,
        ge=0,
        description="Number of prompts to score. Those of `eval` are held out of training, those of a set are the "
        "first ones. 0 holds out none, the default of `eval` if the run has `eval.sets` but no `eval.prompts`.",
    )
    temperature: float = Field(0.0, ge=0, description="Sampling temperature, 0 for greedy decoding.")
    samples_per_prompt: int = Field(
        0,
        ge=0,
        description="k sampled answers per prompt, besides the greedy one, for eval/avg@k, eval/pass@k, eval/maj@k.",
    )
    sampled_temperature: float | None = Field(
        None,
        gt=0,
        description="Temperature of sampled answers, scored as eval/sampled/…. If null, the engine's temperature, "
        "and answers are sampled only if samples_per_prompt is above 0.",
    )
    max_new_tokens: Count | None = Field(None, description="Maximum answer length in tokens. If null, the engine's.")
    score: str | None = Field(
        None, description="Label of the reward whose mean is the evaluation score. If null, the first reward."
    )
    passing_score: float = Field(1.0, description="Minimum score at which an answer counts as correct for pass@k.")

    @property
    def num_sampled(self) -> int:
        """Sampled answers per prompt, besides the greedy one."""
        return self.samples_per_prompt or int(self.sampled_temperature is not None)


class EvalSet(EvalSetOptions):
    """One entry of `eval.sets`."""

    prompts: dict[str, Any] = Field(default_factory=dict, description="Source of the set's prompts.")
    rewards: list[Any] | None = Field(None, description="Rewards that judge the answers. If null, the run's.")


class EvalConfig(EvalSetOptions):
    """Scores held-out prompts before, during and after training."""

    every_episodes: Count | None = Field(
        10, description="Evaluate every N episodes. If null, only before the first and after the last."
    )
    batch_size: Count = Field(64, description="Number of answers generated at once.")
    prompts: dict[str, Any] | None = Field(
        None, description="Source of separate prompts. If null, some of the run's prompts are held out."
    )
    sets: dict[str, EvalSet] = Field(
        default_factory=dict,
        description="Further sets by name, each with prompts and, if they differ, rewards and sampling options.",
    )

    @field_validator("sets")
    @classmethod
    def _check_names(cls, sets: dict[str, EvalSet]) -> dict[str, EvalSet]:
        for name in sets:
            if not _SET_NAME.fullmatch(name) or name in _RESERVED_SET_NAMES:
                reserved = " or ".join(_RESERVED_SET_NAMES)
                raise ValueError(f"{name!r}: a set's name has letters, digits, . _ and -, and cannot be {reserved}")
        return sets

    @model_validator(mode="after")
    def _inherit_options(self) -> Self:
        """Pass sampling options on to sets that do not set them. A run with sets holds no prompts out by default."""
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
                yield Problem(f"{place}rewards", "is empty: name a reward that judges its answers")
            if score is not None and score not in weights:
                suggested = suggestion(score, weights)
                message = f'no reward "{score}" in this run{suggested} (rewards: {list(weights)})'
                yield Problem(f"{place}score", message)


def score_name(run: Mapping[str, Any]) -> str | None:
    """Return the label of the reward that `eval/score` is the mean of, or None if there is none.

    Args:
        run: a resolved run file.

    Example:
        >>> score_name({"eval": {"score": None}, "rewards": [{"name": "exact-match", "label": "correct"}]})
        'correct'
    """
    evaluation, rewards = run.get("eval"), run.get("rewards")
    score = evaluation.get("score") if isinstance(evaluation, Mapping) else None
    if isinstance(score, str):
        return score
    if run.get(OWN_REWARD):
        return OWN_REWARD
    first = rewards[0] if isinstance(rewards, list | tuple) and rewards else None
    label = first.get("label") if isinstance(first, Mapping) else None
    return label if isinstance(label, str) else None
