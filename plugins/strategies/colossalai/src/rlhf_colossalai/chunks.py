"""Reads and writes Gemini's chunks one full tensor at a time, without rounding.

ColossalAI's own `state_dict` gathers full chunks and rounds fp32 weights to the type of the arithmetic.

A chunk is a flat buffer shared by many parameters. Each process holds [shard_begin, shard_end) of it, so its part of a
parameter is the overlap of that interval with the parameter's, and may be empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from colossalai.utils import is_ddp_ignored

if TYPE_CHECKING:
    from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
    from colossalai.zero.gemini.chunk import Chunk
    from torch import Tensor, nn


class ChunkWeights:
    """The weights and optimizer state of one model under Gemini."""

    def __init__(self, model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._manager = model.chunk_manager

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """The full parameter (collective), fp32 if master weights are kept. Frozen ones are whole on every rank."""
        if is_ddp_ignored(parameter):
            return parameter.detach()
        chunk = self._manager.get_chunk(parameter)
        source = chunk.paired_chunk if chunk.paired_chunk is not None else chunk
        info = chunk.tensors_info[parameter]
        payload = source.payload
        if source.is_gathered:
            whole: Tensor = payload[info.offset : info.end].view(parameter.shape).clone()
            return whole
        begin, end = _own_interval(source, info.offset, info.end)
        part = payload[begin - source.shard_begin : end - source.shard_begin]
        return self._assemble(part, begin - info.offset, parameter, source)

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write the full `value` to the fp32 master weights and the half-precision weights."""
        if is_ddp_ignored(parameter):
            parameter.data.copy_(value)
            return
        chunk = self._manager.get_chunk(parameter)
        info = chunk.tensors_info[parameter]
        flat = value.detach().flatten()
        for target in (chunk, chunk.paired_chunk):
            if target is None:
                continue
            for buffer in (target.cuda_shard, target.cpu_shard):
                if not target.is_gathered and buffer is not None:
                    begin, end = _own_interval(target, info.offset, info.end)
                    part = flat[begin - info.offset : end - info.offset]
                    buffer[begin - target.shard_begin : end - target.shard_begin].copy_(part)
            if target.is_gathered:
                target.payload[info.offset : info.end].copy_(flat)

    def state_keys(self, index: int) -> dict[str, int | None]:
        """State keys of parameter `index`, with the value of `step`. Empty if the state is not on this rank."""
        fake = self._optimizer.id_to_fake_params.get(index)
        state = {} if fake is None else self._optimizer.optim.state.get(fake, {})
        return {key: int(value) if key == "step" else None for key, value in state.items()}

    def whole_state(self, index: int, key: str, parameter: nn.Parameter) -> Tensor:
        """One full tensor of the optimizer's state (collective), fp32."""
        chunk = self._manager.get_chunk(parameter)
        fake = self._optimizer.id_to_fake_params.get(index)
        part = torch.empty(0) if fake is None else self._optimizer.optim.state[fake][key]
        if chunk.keep_gathered:
            return part.view(parameter.shape).clone()
        _, offset, _ = self._optimizer.get_offsets(index)
        return self._assemble(part, max(offset, 0), parameter, chunk)

    def put_state(self, index: int, values: dict[str, Any]) -> None:
        """Write this rank's part of full values into the optimizer's state."""
        fake = self._optimizer.id_to_fake_params.get(index)
        if fake is None:
            return
        _, offset, size = self._optimizer.get_offsets(index)
        like = self._optimizer.param_to_chunk16[fake]
        dtype = torch.float32 if like.paired_chunk is not None else like.dtype
        self._optimizer.optim.state[fake] = {
            key: torch.tensor(float(value), device=fake.device)
            if key == "step"
            else value.flatten()[offset : offset + size].to(device=fake.device, dtype=dtype, copy=True)
            for key, value in values.items()
        }

    def _assemble(self, part: Tensor, offset: int, parameter: nn.Parameter, chunk: Chunk) -> Tensor:
        """Return a full tensor in the parameter's shape, fp32, from the parts of all ranks (collective).

        `part` is this rank's flat part, which begins at element `offset`. Each rank copies its part into zeros, and
        the sum over ranks is exact, since the parts do not overlap.
        """
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._model.chunk_manager.device)
        whole[offset : offset + part.numel()].copy_(part)
        dist.all_reduce(whole, group=chunk.torch_pg)
        return whole.view(parameter.shape)


def _own_interval(chunk: Chunk, begin: int, end: int) -> tuple[int, int]:
    """Overlap of this process's shard with [begin, end) of the chunk. An empty interval is (x, x)."""
    first = min(max(begin, chunk.shard_begin), end)
    return first, max(first, min(end, chunk.shard_end))
