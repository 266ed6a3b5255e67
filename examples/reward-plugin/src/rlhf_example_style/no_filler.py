"""`no-filler`: a plain function, without imports from the framework."""

import re

FILLER = re.compile(r"\b(?:basically|actually|as an ai|it is important to note|in conclusion)\b", re.IGNORECASE)


def no_filler(rollouts, *, penalty_per_phrase: float = 0.25, lowest: float = -1.0) -> list[float]:
    """0 for an answer without filler phrases, minus `penalty_per_phrase` for each, at least `lowest`."""
    found = [len(FILLER.findall(rollout.completion)) for rollout in rollouts]
    return [max(lowest, -penalty_per_phrase * count) for count in found]
