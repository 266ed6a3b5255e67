"""The process group of a run: joined from the launcher's environment, with a deadline on every wait.

Shared by all multi-process strategies. Objects are sent over gloo, tensors over their device's backend.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from rlhf_core.distributed.launch_env import LaunchEnv, read_launch_env
from rlhf_core.errors import LostRankError, first_line
from rlhf_core.plugins.errors_of import is_lost_peer
from rlhf_core.util.bounded_thread import BoundedThread

from .loopback import HOST, keep_to_loopback, served_store

if TYPE_CHECKING:
    from rlhf_core.place import ReduceOp

_ROLL_CALL_SECONDS = 1.0
"""How long the remaining processes wait for one another to respond after an error."""
_STORE_SECONDS = 1.0
"""Deadline of one request to the store."""
_LEAVE_SECONDS = 5.0
"""How long a finished process waits for the others to finish."""
_POLL_SECONDS = 0.02
_SETTLE_SECONDS = 2.0
"""How long to wait for gloo's threads at the end."""
_GLOO_THREAD = "(pt_gloo_runloop)"


_groups_joined = itertools.count()
"""Numbers the groups of this process: a launcher's store outlives a group, so keys must not be reused."""


@dataclass
class ProcessGroup:
    """This process's group membership. Without a launcher it is a group of one that opens no port."""

    device: torch.device
    timeout_seconds: float
    """Longest wait for another process in any collective call."""
    env: LaunchEnv = field(default_factory=read_launch_env)
    _owned: bool = False
    _number: int = 0
    """Sequence number of the group; the same on every rank."""
    _errors_seen: int = 0
    _has_lost_ranks: bool = False
    _store_is_stuck: bool = False

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    def join(self) -> None:
        """Join the other processes. Raises `LostRankError` when they do not all join in time.

        An existing group (made by the caller's own code) is used and not destroyed.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if dist.is_initialized():
            self.env = LaunchEnv(rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=self.env.local_rank)
            return
        self._number = next(_groups_joined)
        timeout = timedelta(seconds=self.timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        try:
            meeting = self._meeting(timeout)
            dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, timeout=timeout, **meeting)
        except (dist.DistError, RuntimeError) as error:
            raise self._lost(
                set(range(self.world_size)) - {self.rank},
                f"rank {self.rank} of {self.world_size} could not meet the others (limit "
                f"{self.timeout_seconds:g} s) at {self.env.master_addr}:{self.env.master_port}: {first_line(error)}",
                where="strategy.timeout_seconds",
                hint=f"were all {self.world_size} processes started? is the port free?",
            ) from error
        self._owned = True

    def _meeting(self, timeout: timedelta) -> dict[str, Any]:
        """Where the processes meet: a store of their own, or an address, as torch takes it."""
        if self.world_size == 1:
            return {"store": dist.HashStore()}  # type: ignore[attr-defined]
        is_here = self.env.master_addr in ("localhost", "::1") or str(self.env.master_addr).startswith("127.")
        if is_here:
            keep_to_loopback()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent keeps it; ranks are clients
            return {"init_method": "env://"}
        if not is_here:
            return {"init_method": f"tcp://{self.env.master_addr}:{self.env.master_port}"}
        assert self.env.master_port is not None
        # Every process makes its store here: torch prefixes the keys of stores that it creates itself.
        place = HOST, self.env.master_port
        if self.rank == 0:
            return {"store": served_store(*place, world_size=self.world_size, timeout=timeout)}
        return {"store": TCPStore(*place, self.world_size, is_master=False, timeout=timeout)}

    def leave(self) -> None:
        """Leave the group, if `join` made it. The interpreter may exit after this."""
        if not dist.is_initialized():
            return
        _let_gloo_settle()
        if self._owned:
            # No process closes connections that another still uses; after a loss there is no wait.
            seconds = 0.0 if self._has_lost_ranks else _LEAVE_SECONDS
            self._absent_after(seconds, f"rlhf/{self._number}/leaving")
            dist.destroy_process_group()
        self._owned = False

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", among: dist.ProcessGroup | None = None) -> Tensor:
        """The tensor reduced over ranks (of `among`), as a new tensor of the same dtype and device."""
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        result = tensor.detach().clone()
        if self.world_size > 1:
            with self.guard("an all-reduce"):
                dist.all_reduce(result, op=ops[op], group=among)
        return result

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values are pickled: processes of one run trust each other."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.guard("a gather of objects"):
            dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def guard(self, waiting_for: str) -> Iterator[None]:
        """Turn a lost process into a `LostRankError` that names it; other errors pass unchanged."""
        try:
            yield
        except RuntimeError as error:
            if self.world_size == 1 or not is_lost_peer(error):
                raise
            missing = self._roll_call()
            named = f"rank {', '.join(map(str, missing))}" if missing else "another process"
            raise self._lost(
                missing,
                f"rank {self.rank} waited for {waiting_for}, but {named} is gone or stuck: {first_line(error)}",
                where=f"process group of {self.world_size}",
                hint="see the log of that rank; a slow but living one needs a larger strategy.timeout_seconds",
            ) from error

    def _lost(self, ranks: Iterable[int], message: str, *, where: str, hint: str) -> LostRankError:
        self._has_lost_ranks = True
        error = LostRankError(message, where=where, hint=hint)
        error.ranks = tuple(sorted(ranks))
        return error

    def _roll_call(self) -> list[int]:
        """Ranks that do not respond through the store within a few seconds."""
        self._errors_seen += 1
        return self._absent_after(_ROLL_CALL_SECONDS, f"rlhf/{self._number}/alive/{self._errors_seen}")

    def _absent_after(self, seconds: float, topic: str) -> list[int]:
        """Set a mark under `topic` in the store; returns the ranks that set none within `seconds`."""
        answers: list[list[int]] = []
        if not self._store_is_stuck:
            # Where rank 0 keeps the store and is stopped, a question to it is never answered.
            asking = BoundedThread(lambda: answers.append(self._ask_store(seconds, topic)), "roll call")
            asking.start()
            asking.join(seconds + _STORE_SECONDS)
            self._store_is_stuck = not answers
        return answers[0] if answers else [0]

    def _ask_store(self, seconds: float, topic: str) -> list[int]:
        absent = set(range(self.world_size)) - {self.rank}
        deadline = time.monotonic() + seconds
        try:
            store: Store = dist.distributed_c10d._get_default_store()
            store.set(f"{topic}/{self.rank}", "here")
            while absent and time.monotonic() < deadline:
                absent = {rank for rank in absent if not store.check([f"{topic}/{rank}"])}
                time.sleep(_POLL_SECONDS if absent else 0)
        except (dist.DistError, RuntimeError):
            return [0]  # rank 0 keeps the store where no launcher does: a lost store is a lost rank 0
        return sorted(absent)


def _let_gloo_settle() -> None:
    """Wait until gloo's threads have released their last tensors.

    They release them some time after the result is returned, and need the GIL to do so. In an exiting interpreter,
    requesting the GIL ends the thread and, by `std::terminate`, the process: "terminate called without an active
    exception". Destroying the group joins the threads only if nothing refers to it; sharded models do.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    looks_at_rest = 0
    while looks_at_rest < 2 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # the lock is free meanwhile
        looks_at_rest = 0 if _gloo_is_busy() else looks_at_rest + 1


def _gloo_is_busy() -> bool:
    """Whether a gloo thread is running or about to. False where that is unknown (not on Linux)."""
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            _, name, state = thread.read_text().partition(_GLOO_THREAD)
            if name and state.split()[0] != "S":
                return True
    return False
