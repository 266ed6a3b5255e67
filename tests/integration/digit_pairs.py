"""Preference pairs of answers to sorting problems, and the true score that they come from."""

import json
import random

DIGITS = "0123456789"
NUM_DIGITS = 4


def agreement(completion, answer):
    """Share of places at which the two texts agree."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(len(completion), len(answer))


def right_fraction(rollouts) -> list[float]:
    return [agreement(each.completion, each.answer) for each in rollouts]


def worse(rng, answer):
    """The answer with some digits wrong and, in four of ten, some missing or too many at its end."""
    digits = list(answer)
    for place in rng.sample(range(len(digits)), rng.randrange(len(digits) + 1)):
        digits[place] = rng.choice(DIGITS)
    if rng.random() < 0.4:
        change = rng.choice([-2, -1, 1, 2, 3])
        digits = digits[:change] if change < 0 else digits + rng.choices(DIGITS, k=change)
    return "".join(digits)


def write_pairs(path, count, seed):
    """`count` lines of prompt, chosen and rejected; the chosen answer agrees more with the right one."""
    rng = random.Random(seed)
    with path.open("w") as file:
        while count:
            prompt = "".join(rng.choices(DIGITS, k=NUM_DIGITS))
            answer = "".join(sorted(prompt))
            rejected, chosen = sorted((worse(rng, answer) for _ in range(2)), key=lambda each: agreement(each, answer))
            if agreement(rejected, answer) < agreement(chosen, answer):
                file.write(json.dumps({"prompt": f"{prompt}>", "chosen": chosen, "rejected": rejected}) + "\n")
                count -= 1
