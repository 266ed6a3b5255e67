"""The ranks of the service in lockstep: rank 0 names each call, and all ranks make it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core.errors import DeadlineError, RlhfError

from .wire import InvalidRequest
from .worker import Worker

_STOP = "stop"
logger = logging.getLogger("rlhf.serve_training")


class RankFailure(Exception):
    """An unforeseen error of a rank, whose log has the traceback."""


class Ranks:
    """Calls methods of `Worker` on every rank. Used on rank 0, by one thread at a time."""

    def __init__(self, worker: Worker) -> None:
        """Create the caller.

        Args:
            worker: rank 0's worker. The others run `follow`.
        """
        self.worker = worker
        self._lock = threading.Lock()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method on every rank and return rank 0's result.

        Raises the error of the first rank that failed.

        Args:
            method: name of a method of `Worker`.
            arguments: its arguments, the same on every rank.
        """
        with self._lock:
            self.worker.strategy.broadcast_object((method, arguments))
            return _run(self.worker, method, arguments)

    def stop(self) -> None:
        """End the other ranks and close the workers."""
        with self._lock:
            self.worker.strategy.broadcast_object((_STOP, {}))
            self.worker.close()


def follow(worker: Worker) -> None:
    """Make the calls of rank 0 until it stops. Used on the other ranks.

    Args:
        worker: this rank's worker.
    """
    while True:
        method, arguments = worker.strategy.broadcast_object(None)
        if method == _STOP:
            worker.close()
            return
        try:
            _run(worker, method, arguments)
        except DeadlineError:
            raise
        except (RlhfError, InvalidRequest, RankFailure):  # rank 0 raises it too
            continue


def _run(worker: Worker, method: str, arguments: Mapping[str, Any]) -> Any:
    """Make one call. An error of any rank is raised on all of them, so that they stay in lockstep."""
    function: Callable[..., Any] = getattr(worker, method)
    result: Any = None
    error: Exception | None = None
    try:
        result = function(**arguments)
    except (RlhfError, InvalidRequest) as caught:
        error = caught
    except Exception as caught:
        if worker.strategy.world_size == 1:
            raise
        logger.exception("a call failed on rank %d", worker.strategy.rank)
        error = RankFailure(f"rank {worker.strategy.rank} failed ({type(caught).__name__})")
    for failed in worker.strategy.all_gather_objects(error):
        if failed is not None:
            raise failed
    return result
