"""Adaptive coefficient of the entropy bonus (Skywork-OR1: He 2025, section 3.3)."""

from __future__ import annotations


class EntropyController:
    """Increases the coefficient while the entropy is at or below the target, else decreases it and turns the bonus off.

    Example:
        >>> controller = EntropyController(0.01, target=0.5, step=0.005, most=1.0)
        >>> controller.measure(0.3)  # below the target: the bonus is on, and the coefficient rises
        >>> controller.update()
        >>> controller.value
        0.015
        >>> controller.measure(0.6)
        >>> controller.value
        0.0
    """

    def __init__(self, init: float, target: float, *, step: float, most: float) -> None:
        """Create a controller with the initial coefficient.

        Args:
            init: Initial coefficient.
            target: Entropy in nats per token.
            step: Change of the coefficient per episode.
            most: Maximum coefficient. The minimum is 0.
        """
        self.coefficient = float(init)
        self._target = target
        self._step = step
        self._most = most
        self._is_below = False

    @property
    def value(self) -> float:
        """The coefficient to use, 0 while the last measured entropy is above the target."""
        return self.coefficient if self._is_below else 0.0

    def measure(self, entropy: float) -> None:
        """Set the entropy, in nats per token, of the episode that is trained on next."""
        self._is_below = entropy <= self._target

    def update(self) -> None:
        """Change the coefficient by a step, after training on the episode."""
        moved = self.coefficient + (self._step if self._is_below else -self._step)
        self.coefficient = min(max(moved, 0.0), self._most)
