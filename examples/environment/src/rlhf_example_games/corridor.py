"""`corridor`: an environment with `reset` and `step`, without imports from the framework."""

import re
from random import Random


class Corridor:
    """Find the door by replying left or right. Each step costs `step_cost`, and the door is worth 1."""

    def __init__(self, *, length: int = 5, step_cost: float = 0.05):
        self.length = length
        self.step_cost = step_cost

    def reset(self, task):
        """Place the player and the door. The samples of a prompt have the same `task.seed`, and so the same task."""
        self.place, self.door = Random(task.seed).sample(range(self.length), 2)
        return f"You stand at {self.place} in a corridor from 0 to {self.length - 1}. {self._hint()}"

    def step(self, reply):
        """Move by the last `left` or `right` of the reply. Any other text wastes the turn."""
        moves = re.findall(r"\b(left|right)\b", reply.text.lower())
        if not moves:
            return "Say left or right.", -self.step_cost, False
        self.place = min(max(self.place + (1 if moves[-1] == "right" else -1), 0), self.length - 1)
        if self.place == self.door:
            return None, 1.0 - self.step_cost, True
        return f"You stand at {self.place}. {self._hint()}", -self.step_cost, False

    def _hint(self):
        return f"The door is to the {'right' if self.door > self.place else 'left'}."
