"""`exact-match`: the completion is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .matching import Matcher


def exact_match(
    rollouts: Sequence[Any], *, strip: bool = True, ignore_case: bool = False, extract: str | None = None
) -> list[float]:
    """1 where the completion equals the sample's answer (or one of them, where it is a list), else 0.

    `strip` ignores white space around both. `extract` is a regular expression: what its last match in the
    completion holds (its first group, if it has one) is compared in place of the whole. An answer that is no
    text is compared as Python writes it. A sample without an answer is an error.
    """
    pattern = Matcher(extract) if extract is not None else None

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    scores = []
    for rollout in rollouts:
        accepted = {normal(each) for each in accepted_answers(rollout)}
        found = rollout.completion if pattern is None else pattern.last(rollout)
        scores.append(float(found is not None and normal(found) in accepted))
    return scores


def accepted_answers(rollout: Any) -> list[str]:
    """The right answers of a sample, as text. Raises `ValueError` where it has none."""
    answer = rollout.answer
    if answer is None or answer == []:
        raise ValueError(f"sample {rollout.sample_id} has no answer: give each line of the prompts an `answer`")
    return [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]
