"""The steps of a sample that a process reward model scores: turns of the policy, or parts of one answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rlhf_core.types import Rollout

from .encoding import RolloutEncoder, Sample

Combine = Literal["min", "mean", "product", "last", "turns"]


class StepEncoder(RolloutEncoder):
    """Finds the steps of samples, each read at its last token.

    Where an episode has several turns of the policy, a step is a turn; that needs the policy's tokens. One answer is
    cut behind each separator, as the model was trained. A sample without a step has no places.
    """

    def encode(self, rollout: Rollout) -> Sample:
        found = self._of_turns(rollout) if has_turns(rollout) else self._of_text(rollout)
        self.check_length(found.ids, rollout)
        return found

    def _of_turns(self, rollout: Rollout) -> Sample:
        if not self.same_tokenizer:
            raise ValueError(
                f"sample {rollout.sample_id} has several turns, and the reward model another tokenizer than the "
                "policy: train it from a model with the policy's tokens"
            )
        ids, ends = list(rollout.prompt_ids), []
        for turn in rollout.turns:
            ids += turn.token_ids
            if turn.role == "policy":
                ends.append(len(ids) - 1)
        return Sample(ids, ends)

    def _of_text(self, rollout: Rollout) -> Sample:
        ids, ends, separator = self.prompt_ids(rollout), [], self.config.step_separator
        for step in split_steps(rollout.completion, separator):
            own = self.tokenizer(step + separator, add_special_tokens=False)["input_ids"]
            ids += own
            if own:
                ends.append(len(ids) - 1)
        return Sample(ids, ends)


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
