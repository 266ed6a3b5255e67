"""The steered coefficient of the entropy bonus."""

from __future__ import annotations

from rlhf_objective import EntropyController


def test_by_hand() -> None:
    """Below, below, above, above, below: +, +, -, -, +; in force only in the episodes that are below."""
    controller = EntropyController(0.25, target=1.0, step=0.125, most=0.5)
    in_force, kept = [], []
    for entropy in (0.9, 1.0, 1.1, 3.0, 0.1):
        controller.measure(entropy)
        in_force.append(controller.value)
        controller.update()
        kept.append(controller.coefficient)
    assert in_force == [0.25, 0.375, 0.0, 0.0, 0.25]
    assert kept == [0.375, 0.5, 0.375, 0.25, 0.375]


def test_it_stays_between_nothing_and_the_most() -> None:
    controller = EntropyController(0.0, target=1.0, step=0.3, most=0.5)
    seen = []
    for entropy in (2.0, 0.5, 0.5, 0.5, 2.0, 2.0, 2.0):
        controller.measure(entropy)
        controller.update()
        seen.append(round(controller.coefficient, 6))
    assert seen == [0.0, 0.3, 0.5, 0.5, 0.2, 0.0, 0.0]


def test_nothing_is_in_force_before_anything_was_measured() -> None:
    assert EntropyController(0.5, target=1.0, step=0.1, most=1.0).value == 0.0
