"""The steps of a sample that a process reward model scores: turns of the policy, or parts of one answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from rlhf_core.prompts import PromptEncoder
from rlhf_core.types import Rollout

Combine = Literal["min", "mean", "product", "last", "turns"]


@dataclass(frozen=True, slots=True)
class SteppedSample:
    """Token ids, and the places of the last token of each step; a sample without a step has none."""

    ids: list[int]
    ends: list[int]


class StepEncoder:
    """Finds the steps of samples.

    Where an episode has several turns of the policy, a step is a turn, read at its last token; that needs the policy's
    tokens. One answer is cut behind each separator, as the model was trained.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, separator: str, same_tokenizer: bool, limit_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self._same_tokenizer = same_tokenizer
        self._limit_tokens = limit_tokens
        self._prompts = PromptEncoder(tokenizer)

    def encode(self, rollout: Rollout) -> SteppedSample:
        """Raises `ValueError` naming a sample that cannot be encoded."""
        found = self._of_turns(rollout) if has_turns(rollout) else self._of_text(rollout)
        if len(found.ids) > self._limit_tokens:
            raise ValueError(
                f"sample {rollout.sample_id} is {len(found.ids)} tokens long, the reward model reads "
                f"{self._limit_tokens}: lower engine.max_new_tokens or prompts.max_prompt_tokens"
            )
        return found

    def _of_turns(self, rollout: Rollout) -> SteppedSample:
        if not self._same_tokenizer:
            raise ValueError(
                f"sample {rollout.sample_id} has several turns, and the reward model another tokenizer than the "
                "policy: train it from a model with the policy's tokens"
            )
        ids, ends = list(rollout.prompt_ids), []
        for turn in rollout.turns:
            ids += turn.token_ids
            if turn.role == "policy":
                ends.append(len(ids) - 1)
        return SteppedSample(ids, ends)

    def _of_text(self, rollout: Rollout) -> SteppedSample:
        record = {"prompt": rollout.prompt if rollout.messages is None else list(rollout.messages)}
        ids = list(self._prompts.prompt(record, rollout.sample_id, f"sample {rollout.sample_id}").prompt_ids)
        ends = []
        for step in split_steps(rollout.completion, self._separator):
            own = self._tokenizer(step + self._separator, add_special_tokens=False)["input_ids"]
            ids += own
            if own:
                ends.append(len(ids) - 1)
        return SteppedSample(ids, ends)


def has_turns(rollout: Rollout) -> bool:
    """Whether it is an episode with several turns of the policy."""
    return sum(turn.role == "policy" for turn in rollout.turns) > 1


def split_steps(text: str, separator: str) -> list[str]:
    """The parts between separators, blank ones left out; without a separator each character is a step."""
    if not separator:
        return list(text)
    return [part for part in text.split(separator) if part.strip()]


def by_turn(scores: Sequence[float]) -> dict[int, float]:
    """Each turn's part in the mean of the chances that the turns are right, of their logits."""
    return {turn: chance / len(scores) for turn, chance in enumerate(_chances(scores))}


def _chances(scores: Sequence[float]) -> list[float]:
    return [1.0 / (1.0 + math.exp(-max(min(score, 80.0), -80.0))) for score in scores]


def combined(scores: Sequence[float], how: Combine) -> float:
    """The chance that all is right, of the steps' logits; 0 where there is no step."""
    chances = _chances(scores)
    if not chances:
        return 0.0
    if how in ("mean", "turns"):
        return math.fsum(chances) / len(chances)
    return {"min": min(chances), "product": math.prod(chances), "last": chances[-1]}[how]
