"""`math-equivalence`: whether the result is the same number, set or expression as the answer (math-verify)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlhf_core.protocols import Reward

from .config import MathEquivalenceConfig
from .exact_match import accepted_answers


def math_equivalence(rollouts: Sequence[Any], *, decimal_places: int = 6, require_boxed: bool = False) -> list[float]:
    r"""1 if the last result in the completion equals the sample's answer mathematically, else 0.

    Reads LaTeX (a \boxed{…} result takes precedence), plain expressions, fractions, percentages, sets and intervals.

    The library's own deadlines need the main thread and are therefore disabled. Some answers would keep it busy forever
    (`10^{10^{10}}`), so it runs in a separate process that is killed after the reward's `timeout_seconds`. The other
    answers of the call are then scored in a new process.

    Args:
        rollouts: samples to score.
        decimal_places: decimal places to which floating-point numbers must agree.
        require_boxed: accept only a \boxed{…} result.

    Raises:
        ValueError: if a sample lacks an answer, or its answer is not mathematics.
    """
    from math_verify import verify

    scores = []
    for rollout in rollouts:
        accepted = [_parse_answer(answer, rollout.sample_id) for answer in accepted_answers(rollout)]
        result = _parse(rollout.completion) if not require_boxed or "\\boxed" in rollout.completion else []
        scores.append(
            float(
                any(verify(gold, result, float_rounding=decimal_places, timeout_seconds=None) for gold in accepted)
                if result
                else 0.0
            )
        )
    return scores


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed


def _parse_answer(answer: str, sample_id: int) -> list[Any]:
    # Without dollar signs, LaTeX is not recognized as such.
    parsed = _parse(answer) if "$" in answer or "\\boxed" in answer else (_parse(f"${answer}$") or _parse(answer))
    if not parsed:
        raise ValueError(f"the answer of sample {sample_id} is not mathematics: {answer!r}")
    return parsed


def build(config: MathEquivalenceConfig, context: object) -> Reward:
    """Return the reward with its options."""
    import math_verify  # noqa: F401 - its import takes seconds, which must not count toward an answer's deadline

    return partial(math_equivalence, decimal_places=config.decimal_places, require_boxed=config.require_boxed)
