"""`exact-match`: whether the completion is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .matching import Matcher


def exact_match(
    rollouts: Sequence[Any], *, strip: bool = True, ignore_case: bool = False, extract: str | None = None
) -> list[float]:
    """1 if the completion equals the sample's answer (or one of a list of answers), else 0.

    Args:
        rollouts: samples to score. Their answers are converted by `str`.
        strip: ignore white space around completion and answer.
        ignore_case: ignore the case of letters.
        extract: regular expression. The first group of its last match in the completion, or the match itself without
            groups, is compared instead of the whole completion.

    Raises:
        ValueError: if a sample lacks an answer, or `extract` is not a regular expression.

    Example:
        >>> from types import SimpleNamespace
        >>> exact_match([SimpleNamespace(sample_id=0, completion=" 42", answer=42)])
        [1.0]
    """
    pattern = Matcher(extract) if extract is not None else None

    def normalize(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    scores = []
    for rollout in rollouts:
        accepted = {normalize(each) for each in accepted_answers(rollout)}
        result = rollout.completion if pattern is None else pattern.last(rollout)
        scores.append(float(result is not None and normalize(result) in accepted))
    return scores


def accepted_answers(rollout: Any) -> list[str]:
    """Return the correct answers of a sample as text. Raises `ValueError` if it lacks one."""
    answer = rollout.answer
    if answer is None or answer == []:
        raise ValueError(f"sample {rollout.sample_id} lacks an answer: add `answer` to each line of the prompts")
    return [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]
