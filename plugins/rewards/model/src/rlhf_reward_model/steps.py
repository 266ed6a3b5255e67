"""The steps of a sample that a process reward model scores: turns of the policy, or parts of one answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rlhf_core.types import Rollout

from .encoding import EncodedSample, RolloutEncoder

Combine = Literal["min", "mean", "product", "last", "turns"]


class StepEncoder(RolloutEncoder):
    """Finds the steps of samples, each read at its last token.

    In an episode with several turns of the policy, each turn is a step, which requires the policy's tokens. A single
    answer is split after each separator, as in the model's training. A sample without steps has an empty list of
    positions.
    """

    def encode(self, rollout: Rollout) -> EncodedSample:
        sample = self._encode_turns(rollout) if has_turns(rollout) else self._encode_text(rollout)
        self.check_length(sample.ids, rollout)
        return sample

    def _encode_turns(self, rollout: Rollout) -> EncodedSample:
        if not self.same_tokenizer:
            raise ValueError(
                f"sample {rollout.sample_id} has several turns, but the reward model has another tokenizer than the "
                "policy: train it from a model with the policy's tokenizer"
            )
        ids, ends = list(rollout.prompt_ids), []
        for turn in rollout.turns:
            ids += turn.token_ids
            if turn.role == "policy":
                ends.append(len(ids) - 1)
        return EncodedSample(ids, ends)

    def _encode_text(self, rollout: Rollout) -> EncodedSample:
        ids, ends, separator = self.prompt_ids(rollout), [], self.config.step_separator
        for step in split_steps(rollout.completion, separator):
            step_ids = self.tokenizer(step + separator, add_special_tokens=False)["input_ids"]
            ids += step_ids
            if step_ids:
                ends.append(len(ids) - 1)
        return EncodedSample(ids, ends)


def has_turns(rollout: Rollout) -> bool:
    """Whether the sample is an episode with several turns of the policy."""
    return sum(turn.role == "policy" for turn in rollout.turns) > 1


def split_steps(text: str, separator: str) -> list[str]:
    """Split a text into steps at the separators and drop blank steps. An empty separator makes each character a step.

    Example:
        >>> split_steps("1 + 2 = 3. So 3. ", ". ")
        ['1 + 2 = 3', 'So 3']
    """
    if not separator:
        return list(text)
    return [part for part in text.split(separator) if part.strip()]


def by_turn(logits: Sequence[float]) -> dict[int, float]:
    """Each turn's contribution to the mean probability that the turns are right.

    Example:
        >>> by_turn([0.0, 0.0])
        {0: 0.25, 1: 0.25}
    """
    return {turn: probability / len(logits) for turn, probability in enumerate(_probabilities(logits))}


def _probabilities(logits: Sequence[float]) -> list[float]:
    return [1.0 / (1.0 + math.exp(-max(min(logit, 80.0), -80.0))) for logit in logits]


def combine(logits: Sequence[float], method: Combine) -> float:
    """Combine the logits of steps into one score in [0, 1], their combined probability. 0 without steps.

    Example:
        >>> combine([0.0, 0.0], "product")
        0.25
    """
    probabilities = _probabilities(logits)
    if not probabilities:
        return 0.0
    if method in ("mean", "turns"):
        return math.fsum(probabilities) / len(probabilities)
    return {"min": min(probabilities), "product": math.prod(probabilities), "last": probabilities[-1]}[method]
