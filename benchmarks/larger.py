"""Environment of `several_environments.py`: the policy replies with the larger of two digits."""

from __future__ import annotations

from typing import Any


class Larger:
    """The larger of two digits."""

    def reset(self, task: Any) -> str:
        pair = task.seed % 100
        self.answer = str(max(divmod(pair, 10)))
        return f"{pair:02d}>"

    def step(self, reply: Any) -> tuple[None, float, bool]:
        return None, float(reply.text.strip() == self.answer), True
