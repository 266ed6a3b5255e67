"""ColossalAI without a GPU: an accelerator whose compute device is the host.

ColossalAI's `CpuAccelerator` raises an error if a stream is requested, and its ZeRO code compares the accelerator's
name with "cuda" to check whether a chunk is on the compute device. Neither is meaningful on a host with one memory and
one queue, so these calls do nothing here. With a GPU this module is not used.
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


class _HostStream:
    """Stream of a device that runs everything in order."""

    def wait_stream(self, other: _HostStream) -> None:
        """Do nothing, since the work of `other` is done."""


class HostAccelerator(CpuAccelerator):  # type: ignore[misc]  # ColossalAI is untyped
    """The host as compute device. ColossalAI's ZeRO code requires its name to be `cuda`."""

    @property
    def name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Do nothing, since all work is done."""

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> _HostStream:  # the name is ColossalAI's
        return _HostStream()

    def current_stream(self, device: torch.device | None = None) -> _HostStream:
        return _HostStream()

    def stream(self, stream_: _HostStream | None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def use_host(device: torch.device) -> None:
    """Make ColossalAI compute on the host if the run's device is the CPU."""
    if device.type == "cpu" and not isinstance(get_accelerator(), HostAccelerator):
        set_accelerator(HostAccelerator())


def keep_chunks_in_place(manager: ChunkManager) -> None:
    """Keep a Gemini model's shards on the compute device.

    Gemini keeps a shard in one of two slots, `cuda_shard` or `cpu_shard`, and distinguishes them by device type. With
    the host as compute device that test always reports "offloaded", and Gemini would not find a shard in that slot.
    """
    for group in manager.chunk_groups.values():
        for chunk in group:
            if chunk.cpu_shard is not None and chunk.cuda_shard is None:
                chunk.cuda_shard, chunk.cpu_shard = chunk.cpu_shard, None
                manager.total_mem["cpu"] -= chunk.shard_mem
                manager.total_mem["cuda"] += chunk.shard_mem
    manager.move_chunk = _stay


def _stay(chunk: Chunk, device: torch.device, force_copy: bool = False, async_move: bool = False) -> None:
    """Do nothing, since the host is the only device."""
