"""The program that makes problems: `python -m rlhf_reasoning_gym.generate`, its order on standard input.

It runs by itself with one fixed hash seed: some tasks depend on the order of sets, some set global random state.
Prints one JSON object a line: `{"made": problem}`, or `{"error": …}` and ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rlhf_reasoning_gym.library import UnknownTask, make_dataset


def main() -> None:
    """Make the problems that the order on standard input asks for."""
    order = json.loads(sys.stdin.read())
    tell, sys.stdout = sys.stdout, sys.stderr  # keep what tasks print off stdout
    try:
        dataset = make_dataset(order["task"], order["options"], seed=order["seed"], size=order["size"])
    except Exception as error:  # the library's errors about the options, reported to the caller
        known = error.known if isinstance(error, UnknownTask) else []
        print(json.dumps({"error": f"{error}" or type(error).__name__, "known": known}), file=tell, flush=True)
        return
    for index in range(order["size"]):
        print(json.dumps({"made": dataset[index]}, default=_plain), file=tell, flush=True)


def _plain(value: Any) -> Any:
    """NumPy scalars as plain numbers; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    main()
