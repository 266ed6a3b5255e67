"""An environment with a tool: the policy may have two numbers calculated, and then says the result.

The calculator reads whole numbers and an operation by one bounded pattern; nothing that a model writes is run.
"""

from __future__ import annotations

import operator
import random
import re
from typing import Any

PROBLEMS = {
    "*": "A box holds {first} pens. How many pens are in {second} boxes?",
    "+": "Ann has {first} pens and Ben has {second} pens. How many pens do they have together?",
    "-": "Ann has {first} pens and gives {second} pens to Ben. How many pens does Ann have left?",
}
CALCULATE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALL = re.compile(r"CALC\( ?(\d{1,6}) ?([-+*]) ?(\d{1,6}) ?\)")
LAST_NUMBER = re.compile(r"(?<![\d.,])(-?\d{1,12})\.?\s*\Z")
EXAMPLE = (
    {"role": "system", "content": "Calculate first."},
    {"role": "user", "content": PROBLEMS["*"].format(first=12, second=34)},
    {"role": "assistant", "content": "CALC(12 * 34)"},
    {"role": "user", "content": "CALC says 408. What is the answer?"},
    {"role": "assistant", "content": "The answer is 408."},
)


class Calculator:
    """Short problems with numbers of two digits: 1 for an answer that ends with the right number."""

    def reset(self, task: Any) -> list[dict[str, str]]:
        """A problem of the task's seed, behind an example of a call."""
        draw = random.Random(task.seed)
        second, first = sorted((draw.randint(11, 99), draw.randint(11, 99)))
        operation = draw.choice(list(PROBLEMS))
        self.right = CALCULATE[operation](first, second)
        return [*EXAMPLE, {"role": "user", "content": PROBLEMS[operation].format(first=first, second=second)}]

    def step(self, reply: Any) -> tuple[str | None, float, bool]:
        """The first call of a reply is answered by the calculator; a reply without one is the answer."""
        call = CALL.search(reply.text)
        if call is not None:
            result = CALCULATE[call[2]](int(call[1]), int(call[3]))
            return f"CALC says {result}. What is the answer?", 0.0, False
        said = LAST_NUMBER.search(reply.text)
        return None, float(said is not None and int(said[1]) == self.right), True
