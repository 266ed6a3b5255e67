"""The process group of a run, joined through the launcher's environment, with a deadline on every wait.

All multi-process strategies use it. Objects are sent over gloo, tensors over their device's backend.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
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
"""How long the remaining processes wait for each other to respond after an error."""
_STORE_SECONDS = 1.0
"""Deadline for one request to the store."""
_LEAVE_SECONDS = 5.0
"""How long a finished process waits for the others to finish."""
_POLL_SECONDS = 0.02
_SETTLE_SECONDS = 2.0
"""How long to wait for gloo's threads at exit."""
_GLOO_THREAD = "pt_gloo_runloop"


_groups_joined = itertools.count()
"""Counter of this process's groups. A launcher's store outlives a group, so keys must not be reused."""


@dataclass
class ProcessGroup:
    """This process's group membership. Without a launcher it is a group of one, which does not open a port.

    Example:
        >>> group = ProcessGroup(torch.device("cpu"), timeout_seconds=60.0, env=LaunchEnv())
        >>> group.join()
        >>> group.all_gather_objects("rank 0's value")
        ["rank 0's value"]
        >>> group.leave()
    """

    device: torch.device
    timeout_seconds: float
    """Maximum wait for another process in any collective call."""
    env: LaunchEnv = field(default_factory=read_launch_env)
    _owned: bool = False
    _number: int = 0
    """Sequence number of the group, the same on every rank."""
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
        """Join the other processes. Called by every rank.

        An existing default group (created by the caller's own code) is used, and not destroyed by `leave`.

        Raises:
            LostRankError: not all processes joined in time.
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
            rendezvous = self._rendezvous(timeout)
            dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, timeout=timeout, **rendezvous)
        except (dist.DistError, RuntimeError) as error:
            raise self._lost_rank_error(
                set(range(self.world_size)) - {self.rank},
                f"rank {self.rank} of {self.world_size} could not connect to the other processes (limit "
                f"{self.timeout_seconds:g} s) at {self.env.master_addr}:{self.env.master_port}: {first_line(error)}",
                where="strategy.timeout_seconds",
                hint=f"were all {self.world_size} processes started? is the port free?",
            ) from error
        self._owned = True

    def _rendezvous(self, timeout: timedelta) -> dict[str, Any]:
        """Rendezvous arguments for `init_process_group`: a store or an address."""
        if self.world_size == 1:
            return {"store": dist.HashStore()}  # type: ignore[attr-defined]
        is_local = self.env.master_addr in ("localhost", "::1") or str(self.env.master_addr).startswith("127.")
        if is_local:
            keep_to_loopback()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent hosts it, ranks are clients
            return {"init_method": "env://"}
        if not is_local:
            return {"init_method": f"tcp://{self.env.master_addr}:{self.env.master_port}"}
        assert self.env.master_port is not None
        # Every process creates its store here, since torch prefixes the keys of stores that it creates itself.
        place = HOST, self.env.master_port
        if self.rank == 0:
            return {"store": served_store(*place, world_size=self.world_size, timeout=timeout)}
        return {"store": TCPStore(*place, self.world_size, is_master=False, timeout=timeout)}

    def leave(self) -> None:
        """Leave the group if `join` created it. The interpreter can exit safely after this."""
        if not dist.is_initialized():
            return
        _wait_for_gloo()
        if self._owned:
            # Do not close connections that another process still uses. After a lost rank, do not wait.
            seconds = 0.0 if self._has_lost_ranks else _LEAVE_SECONDS
            self._find_absent(seconds, f"rlhf/{self._number}/leaving")
            dist.destroy_process_group()
        self._owned = False

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", among: dist.ProcessGroup | None = None) -> Tensor:
        """Reduce a tensor over all ranks.

        Args:
            tensor: this rank's tensor, with the same shape and dtype on all ranks.
            op: reduction.
            among: process group to reduce over instead of all ranks.

        Returns:
            A new tensor with the same dtype and device.
        """
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        result = tensor.detach().clone()
        if self.world_size > 1:
            with self.guard("an all-reduce"):
                dist.all_reduce(result, op=ops[op], group=among)
        return result

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Values are pickled, since processes of one run trust each other.

        Args:
            value: this rank's value.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.guard("a gather of objects"):
            dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def guard(self, waiting_for: str) -> Iterator[None]:
        """Context that converts errors from a lost process to a `LostRankError` that names it.

        Args:
            waiting_for: what this process waits for, for the message.

        Raises:
            LostRankError: another process exited or does not respond. Other errors pass unchanged.
        """
        try:
            yield
        except RuntimeError as error:
            if self.world_size == 1 or not is_lost_peer(error):
                raise
            missing = self._roll_call()
            named = f"rank {', '.join(map(str, missing))}" if missing else "another process"
            raise self._lost_rank_error(
                missing,
                f"rank {self.rank} waited for {waiting_for}, but {named} exited or is stuck: {first_line(error)}",
                where=f"process group of {self.world_size}",
                hint="see the log of that rank. If it is slow but alive, raise strategy.timeout_seconds",
            ) from error

    def _lost_rank_error(self, ranks: Iterable[int], message: str, *, where: str, hint: str) -> LostRankError:
        self._has_lost_ranks = True
        error = LostRankError(message, where=where, hint=hint)
        error.ranks = tuple(sorted(ranks))
        return error

    def _roll_call(self) -> list[int]:
        """Find the ranks that do not respond through the store within a few seconds."""
        self._errors_seen += 1
        return self._find_absent(_ROLL_CALL_SECONDS, f"rlhf/{self._number}/alive/{self._errors_seen}")

    def _find_absent(self, seconds: float, topic: str) -> list[int]:
        """Wait until all ranks have set their key under `topic` in the store, at most `seconds`.

        This sets the key of this rank first. Returns the ranks without a key at the end, or `[0]` if the store fails
        or does not respond.
        """
        results: list[list[int]] = []
        if not self._store_is_stuck:
            # If rank 0 hosts the store and is stopped, requests to it never return.
            thread = BoundedThread(lambda: results.append(self._poll_marks(seconds, topic)), "roll call")
            thread.start()
            thread.join(seconds + _STORE_SECONDS)
            self._store_is_stuck = not results
        return results[0] if results else [0]

    def _poll_marks(self, seconds: float, topic: str) -> list[int]:
        absent = set(range(self.world_size)) - {self.rank}
        deadline = time.monotonic() + seconds
        try:
            store: Store = dist.distributed_c10d._get_default_store()
            store.set(f"{topic}/{self.rank}", "here")
            while absent and time.monotonic() < deadline:
                absent = {rank for rank in absent if not store.check([f"{topic}/{rank}"])}
                time.sleep(_POLL_SECONDS if absent else 0)
        except (dist.DistError, RuntimeError):
            return [0]  # without a launcher rank 0 hosts the store, so a lost store is a lost rank 0
        return sorted(absent)


def _wait_for_gloo() -> None:
    """Wait until gloo's threads have released their last tensors.

    They release them some time after the result is returned, and need the GIL to do so. In an exiting interpreter,
    requesting the GIL ends the thread and, through `std::terminate`, the process: "terminate called without an active
    exception". Destroying the group joins the threads only if nothing refers to it, but sharded models do.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    num_idle = 0
    while num_idle < 2 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # the GIL is free meanwhile
        num_idle = 0 if _gloo_is_busy() else num_idle + 1


def _gloo_is_busy() -> bool:
    """Whether a gloo thread is running or about to run. False if unknown (not on Linux)."""
    for each in psutil.Process().threads():
        with contextlib.suppress(psutil.Error):  # the thread ended meanwhile, or a system without processes per thread
            thread = psutil.Process(each.id)
            if thread.name() == _GLOO_THREAD and thread.status() != psutil.STATUS_SLEEPING:
                return True
    return False
