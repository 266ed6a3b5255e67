"""Check structures of clients in a child process that can be killed.

llguidance compiles some small schemas for hours (an integer that is a multiple of a large number), and a thread cannot
be ended. A structure that the child compiled in time is then compiled in this process. Requests and answers are JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref

from rlhf_containment.processes import ProcessFault, ProcessTimeout, RequestProcess, serve_requests
from rlhf_core.errors import DataError, UserInputError
from rlhf_forward import Structure, byte_tokens, compile_structure

CHECK_SECONDS = 10.0
"""Maximum time to compile a client's structure."""
QUEUE_SECONDS = 30.0
"""Maximum wait for the checks of other clients."""
MEMORY_BYTES = 2 << 30
_WHERE = "engine hf"


class StructureCheck:
    """Checks structures one at a time. Thread-safe. The child process starts with the first one."""

    def __init__(self, *, check_seconds: float = CHECK_SECONDS) -> None:
        self._check_seconds = check_seconds
        self._lock = threading.Lock()
        self._worker: RequestProcess | None = None

    def check(self, structure: Structure, vocabulary_size: int) -> None:
        """Compile a structure in the child process, which is replaced if it was too slow or died.

        Raises `DataError` if the structure is invalid, or takes too much time or memory.
        """
        request = json.dumps([structure.kind, structure.text, vocabulary_size]).encode()
        if not self._lock.acquire(timeout=QUEUE_SECONDS):
            problem = f"was not checked within {QUEUE_SECONDS:g} seconds, since those of other clients come first"
            raise _refused(structure, problem, "send the request again")
        try:
            problem = json.loads(self._process().ask(request, self._check_seconds))
        except (OSError, ProcessFault, ValueError) as error:
            self.close()
            hint = "simplify it, for example with smaller counts and bounds"
            raise _refused(structure, self._described(error), hint) from error
        finally:
            self._lock.release()
        if problem is not None:
            raise DataError(problem, where=_WHERE, hint="correct or simplify it")

    def _process(self) -> RequestProcess:
        if self._worker is None:
            self._worker = RequestProcess("rlhf_hf.structure_check", memory_limit_bytes=MEMORY_BYTES)
            weakref.finalize(self, self._worker.end)
            self._worker.start(b"null")
        return self._worker

    def _described(self, error: Exception) -> str:
        if isinstance(error, ProcessTimeout):  # without the stack trace, since a client reads this
            return f"was not compiled within {self._check_seconds:g} seconds"
        if isinstance(error, ProcessFault):
            return f"is refused: the process that compiled it {error}"
        return f"is refused: no process could compile it ({error})"

    def close(self) -> None:
        """End the child process. A later check starts another one."""
        if self._worker is not None:
            self._worker.end()
        self._worker = None


def _refused(structure: Structure, problem: str, hint: str) -> DataError:
    return DataError(f"the {structure.kind} of the option structure {problem}", where=_WHERE, hint=hint)


def answer(request: bytes) -> bytes:
    """Answer a request in the child process: null, or the problem. The request `null` only imports modules."""
    if (arguments := json.loads(request)) is None:
        return b"null"
    kind, text, vocabulary_size = arguments
    try:
        compile_structure(Structure(kind, text), byte_tokens(vocabulary_size), where=_WHERE)
    except UserInputError as error:
        return json.dumps(error.message).encode()
    return b"null"


if __name__ == "__main__":
    serve_requests(int(sys.argv[1]), int(sys.argv[2]), answer)
