"""Coefficient of the entropy bonus, steered to a target (Skywork-OR1: He 2025, section 3.3)."""

from __future__ import annotations


class EntropyController:
    """Adds a step while the entropy is at or below the target and takes one off above; the bonus is off above."""

    def __init__(self, init: float, target: float, *, step: float, most: float) -> None:
        """init, step, most: of the coefficient, which stays within 0 and `most`; target: nats a token."""
        self.coefficient = float(init)
        self._target = target
        self._step = step
        self._most = most
        self._is_below = False

    @property
    def value(self) -> float:
        """The coefficient in force: 0 while the entropy last measured lies above the target."""
        return self.coefficient if self._is_below else 0.0

    def measure(self, entropy: float) -> None:
        """Entropy of the episode that is trained on next, in nats a token."""
        self._is_below = entropy <= self._target

    def update(self) -> None:
        """Move the coefficient, once the episode has been trained on."""
        moved = self.coefficient + (self._step if self._is_below else -self._step)
        self.coefficient = min(max(moved, 0.0), self._most)
