"""ColossalAI without a GPU: an accelerator whose compute device is the host.

ColossalAI's `CpuAccelerator` raises wherever a stream, an event or a device is asked for, and its ZeRO code
compares the accelerator's name with "cuda" to tell that a chunk is on the device that computes. Neither means anything
on a host with one memory and one queue, so here these calls do nothing.
Nothing of this is used when there is a GPU.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from colossalai.accelerator import get_accelerator, set_accelerator
from colossalai.accelerator.cpu_accelerator import CpuAccelerator

if TYPE_CHECKING:
    from colossalai.zero.gemini.chunk import Chunk, ChunkManager


class _HostQueue:
    """A stream or event of a device that runs everything in order."""

    def wait_stream(self, other: _HostQueue) -> None:
        """Do nothing: the work of `other` is done."""

    def wait_event(self, event: _HostQueue) -> None:
        """Do nothing: the event has happened."""

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def record(self, stream: _HostQueue | None = None) -> None:
        """Do nothing: the event happens at once."""

    def query(self) -> bool:
        return True


class HostAccelerator(CpuAccelerator):  # type: ignore[misc]  # ColossalAI has no types
    """The host as the device that computes. Its name is what ColossalAI's ZeRO code asks a compute device for."""

    _queue = _HostQueue()

    @property
    def name(self) -> str:
        return "cuda"

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: torch.device | int | None = None) -> None:
        """Do nothing: there is only one."""

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Do nothing: no work is pending."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def reset_peak_memory_stats(self, device: torch.device | int | None = None) -> None:
        """Do nothing: the operating system tracks peak memory."""

    def memory_allocated(self, device: torch.device | int | None = None) -> int:
        return int(self.memory_reserved())

    def max_memory_allocated(self, device: torch.device | int | None = None) -> int:
        return int(self.max_memory_reserved()) * 1024

    # The capital letters are ColossalAI's: these two make a torch.cuda.Stream and a torch.cuda.Event elsewhere.
    def Stream(self, device: torch.device | None = None, priority: int = 0) -> _HostQueue:
        return self._queue

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> _HostQueue:
        return self._queue

    def current_stream(self, device: torch.device | None = None) -> _HostQueue:
        return self._queue

    def default_stream(self, device: torch.device | None = None) -> _HostQueue:
        return self._queue

    def set_stream(self, stream_: _HostQueue) -> None:
        """Do nothing: there is only one."""

    def stream(self, stream_: _HostQueue | None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def use_host(device: torch.device) -> None:
    """Let ColossalAI compute on the host, if that is the device of this run."""
    if device.type == "cpu" and not isinstance(get_accelerator(), HostAccelerator):
        set_accelerator(HostAccelerator())


def keep_chunks_in_place(manager: ChunkManager) -> None:
    """Keep a Gemini model's shards on the compute device.

    Gemini keeps a shard in one of two slots, `cuda_shard` or `cpu_shard`, and tells them apart by device type. With
    the host as compute device that test always says "offloaded", and a shard put there would not be found again.
    """
    for group in manager.chunk_groups.values():
        for chunk in group:
            if chunk.cpu_shard is not None and chunk.cuda_shard is None:
                chunk.cuda_shard, chunk.cpu_shard = chunk.cpu_shard, None
                manager.total_mem["cpu"] -= chunk.shard_mem
                manager.total_mem["cuda"] += chunk.shard_mem
    manager.move_chunk = _stay


def _stay(chunk: Chunk, device: torch.device, force_copy: bool = False, async_move: bool = False) -> None:
    """Do nothing: there is no other device."""
