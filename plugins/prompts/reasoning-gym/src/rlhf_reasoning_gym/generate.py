"""Process that generates problems. Its first request is the order, each later one the index of a problem.

It has a fixed hash seed and its own random state, because some tasks depend on the order of sets or set global state.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rlhf_containment.processes import serve_requests
from rlhf_reasoning_gym.library import UnknownTask, make_dataset


class Maker:
    """Generates the problems of one order."""

    def __init__(self) -> None:
        self._dataset: Any = None

    def answer(self, request: bytes) -> bytes:
        """Return the problem of an index. For the order, return `{}`, or `{"error": …}` if the library rejects it."""
        message = json.loads(request)
        if self._dataset is not None:
            return json.dumps(self._dataset[message], default=_plain).encode()
        try:
            self._dataset = make_dataset(**message)
        except Exception as error:  # the library's errors about the options, reported to the caller
            known = error.known_tasks if isinstance(error, UnknownTask) else []
            return json.dumps({"error": f"{error}" or type(error).__name__, "known": known}).encode()
        return b"{}"


def _plain(value: Any) -> Any:
    """Convert NumPy scalars to Python numbers, and anything else to text."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    serve_requests(int(sys.argv[1]), int(sys.argv[2]), Maker().answer)
