"""A dense reward for sort-digits: how much of the answer stands in its place."""


def sorted_fraction(rollouts):
    return [
        sum(a == b for a, b in zip(rollout.completion, rollout.answer, strict=False)) / len(rollout.answer)
        for rollout in rollouts
    ]
