"""The process that makes problems: its first request is the order, each later one the index of a problem.

It has one fixed hash seed and its own random state: some tasks depend on the order of sets, some set global state.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rlhf_containment.processes import serve_requests
from rlhf_reasoning_gym.library import UnknownTask, make_dataset


class Maker:
    """Makes the problems of one order."""

    def __init__(self) -> None:
        self._dataset: Any = None

    def answer(self, request: bytes) -> bytes:
        """The problem of an index; to the order `{}`, or `{"error": …}` if the library refuses it."""
        given = json.loads(request)
        if self._dataset is not None:
            return json.dumps(self._dataset[given], default=_plain).encode()
        try:
            self._dataset = make_dataset(given["task"], given["options"], seed=given["seed"], size=given["size"])
        except Exception as error:  # the library's errors about the options, reported to the caller
            known = error.known if isinstance(error, UnknownTask) else []
            return json.dumps({"error": f"{error}" or type(error).__name__, "known": known}).encode()
        return b"{}"


def _plain(value: Any) -> Any:
    """NumPy scalars as plain numbers; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    serve_requests(int(sys.argv[1]), int(sys.argv[2]), Maker().answer)
