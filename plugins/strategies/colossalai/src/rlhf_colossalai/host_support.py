"""ColossalAI without a GPU: an accelerator whose compute device is the host.

ColossalAI's `CpuAccelerator` raises wherever a stream is asked for, and its ZeRO code
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


class _HostStream:
    """A stream of a device that runs everything in order."""

    def wait_stream(self, other: _HostStream) -> None:
        """Do nothing: the work of `other` is done."""


class HostAccelerator(CpuAccelerator):  # type: ignore[misc]  # ColossalAI has no types
    """The host as the device that computes. Its name is what ColossalAI's ZeRO code asks a compute device for."""

    @property
    def name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Do nothing: no work is pending."""

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> _HostStream:  # the name is ColossalAI's
        return _HostStream()

    def current_stream(self, device: torch.device | None = None) -> _HostStream:
        return _HostStream()

    def stream(self, stream_: _HostStream | None) -> AbstractContextManager[None]:
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
