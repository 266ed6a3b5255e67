"""`math-equivalence`: the answer means the same number, set or expression as the right one (math-verify)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlhf_core.protocols import Reward

from .config import MathEquivalenceConfig
from .exact_match import accepted_answers


def math_equivalence(rollouts: Sequence[Any], *, decimal_places: int = 6, require_boxed: bool = False) -> list[float]:
    r"""1 where the last result in the completion equals the sample's answer mathematically, else 0.

    Understands LaTeX (a \boxed{…} result goes first), plain expressions, fractions, percentages, sets and
    intervals. `decimal_places` is how closely floating-point numbers are compared. `require_boxed` takes a
    \boxed{…} result only. An answer that cannot be read as mathematics is an error.

    The library's own deadlines need the main thread, so they are off. An answer can keep it busy for ever
    (`10^{10^{10}}`), so it runs in a separate process, which the reward's `timeout_seconds` ends. The other answers of
    its call are scored in a new one.
    """
    from math_verify import verify

    scores = []
    for rollout in rollouts:
        accepted = [_parse_answer(answer, rollout.sample_id) for answer in accepted_answers(rollout)]
        found = _parse(rollout.completion) if not require_boxed or "\\boxed" in rollout.completion else []
        scores.append(
            float(
                any(verify(gold, found, float_rounding=decimal_places, timeout_seconds=None) for gold in accepted)
                if found
                else 0.0
            )
        )
    return scores


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed


def _parse_answer(answer: str, sample_id: int) -> list[Any]:
    # Without dollar signs, LaTeX is not recognised as such.
    parsed = _parse(answer) if "$" in answer or "\\boxed" in answer else (_parse(f"${answer}$") or _parse(answer))
    if not parsed:
        raise ValueError(f"the answer of sample {sample_id} is not mathematics: {answer!r}")
    return parsed


def build(config: MathEquivalenceConfig, context: object) -> Reward:
    """The reward with its options, for the plugin's component."""
    import math_verify  # noqa: F401 - its import takes seconds, which are not to count in the deadline of an answer

    return partial(math_equivalence, decimal_places=config.decimal_places, require_boxed=config.require_boxed)
