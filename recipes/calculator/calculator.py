"""An environment with a tool: the policy may call a calculator, and then replies with the result.

One bounded pattern parses whole numbers and an operation. Text of a model is never executed.
"""

from __future__ import annotations

import operator
import random
import re
from typing import Any

OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
CALCULATE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALL = re.compile(r"CALC\( ?(\d{1,6}) ?([-+*]) ?(\d{1,6}) ?\)")
LAST_NUMBER = re.compile(r"(?<![\d.,])(-?\d{1,12})\.?\s*\Z")
EXAMPLE = (
    {"role": "system", "content": "Calculate first."},
    {"role": "user", "content": "What is 12 times 34?"},
    {"role": "assistant", "content": "CALC(12 * 34)"},
    {"role": "user", "content": "CALC says 408. What is the answer?"},
    {"role": "assistant", "content": "The answer is 408."},
)


class Calculator:
    """Sums, differences and products of two-digit numbers. An answer that ends with the right number scores 1."""

    def reset(self, task: Any) -> list[dict[str, str]]:
        """Return a problem that depends on the task's seed, after an example of a call."""
        draw = random.Random(task.seed)
        first, second = draw.randint(11, 99), draw.randint(11, 99)
        word = draw.choice(list(OPERATIONS))
        self.right = CALCULATE[OPERATIONS[word]](first, second)
        return [*EXAMPLE, {"role": "user", "content": f"What is {first} {word} {second}?"}]

    def step(self, reply: Any) -> tuple[str | None, float, bool]:
        """Answer the first call of a reply. A reply without a call is the answer."""
        call = CALL.search(reply.text)
        if call is not None:
            result = CALCULATE[call[2]](int(call[1]), int(call[3]))
            return f"CALC says {result}. What is the answer?", 0.0, False
        said = LAST_NUMBER.search(reply.text)
        return None, float(said is not None and int(said[1]) == self.right), True
