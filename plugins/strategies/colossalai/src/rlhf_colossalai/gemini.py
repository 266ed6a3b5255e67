"""`gemini`: weights, gradients and optimizer state in sharded chunks (ColossalAI's `GeminiPlugin`, ZeRO-3).

A process computes in bf16 (or fp16) with weights gathered chunk by chunk. Training keeps sharded fp32 ("master")
weights, which `chunks.py` reads and writes one tensor at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf_core.strategy import StateBytes, TrainedModel
from rlhf_strategies import Prepared, torch_dtype

from .config import GeminiConfig
from .quiet_import import quietly
from .zero_strategy import ZeroStrategy

with quietly():
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.zero.gemini import GeminiOptimizer

    from .chunks import ChunkWeights
    from .host_support import keep_chunks_in_place

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


_CHUNK_M = 32
"""Minimum size of a chunk, and the range of its search, in units of 2^20 elements."""
_CHUNKS_OF_SMALL_MODELS = 4


class GeminiStrategy(ZeroStrategy):
    """Shards weights, gradients and optimizer state. bf16 unless fp16 is configured."""

    shards_parameters = True
    precision_on_cpu = "bf16"
    offload_options = ("offload_optim_frac", "offload_param_frac")
    _config: GeminiConfig

    def state_bytes(self, num_processes: int, dtype: torch.dtype) -> StateBytes:
        """Bytes per parameter: sharded, except for the fraction of weights that is not. Includes offloaded parts."""
        size = torch_dtype(self.precision).itemsize
        sharded = self._config.shard_param_frac
        return StateBytes(
            weights=size * (1 - sharded + sharded / num_processes),
            gradients=size / num_processes,
            optimizer=self._optimizer_bytes / num_processes,
            reference=size,
        )

    def _after_wrap(self, trained: TrainedModel) -> None:
        if self.device.type == "cpu":
            keep_chunks_in_place(trained.model.chunk_manager)

    def _put_fp32(self, trained: TrainedModel, parameter: nn.Parameter, value: Tensor) -> None:
        ChunkWeights(trained.model, trained.optimizer).put(parameter, value)

    def _plugin(self, model: nn.Module, max_grad_norm: float | None) -> GeminiPlugin:
        config, on_gpu = self._config, self.device.type == "cuda"
        # A model smaller than one chunk would not be sharded, and then ColossalAI 0.5.0 counts the gradients of all
        # micro-batches except the last once per process. With several chunks it is sharded and counted correctly.
        trainable_m = sum(p.numel() for p in model.parameters() if p.requires_grad) / 2**20
        return GeminiPlugin(
            precision=self.precision,
            shard_param_frac=config.shard_param_frac,
            offload_optim_frac=config.offload_optim_frac,
            offload_param_frac=config.offload_param_frac,
            pin_memory=on_gpu,
            enable_async_reduce=on_gpu,  # always pins memory
            search_range_m=min(_CHUNK_M, math.ceil(trainable_m)),
            min_chunk_size_m=min(_CHUNK_M, trainable_m / _CHUNKS_OF_SMALL_MODELS),
            enable_gradient_accumulation=True,  # an update may have several micro-batches
            max_norm=_bound(max_grad_norm),  # else the norm is not computed
        )

    def _clip_at(self, optimizer: GeminiOptimizer, max_grad_norm: float | None) -> None:
        optimizer.max_norm = _bound(max_grad_norm)

    @contextlib.contextmanager
    def _recording_norm(self, optimizer: GeminiOptimizer, record: Callable[[float], None]) -> Iterator[None]:
        combined_scale = optimizer._get_combined_scale
        loss_scale = getattr(optimizer.mix_precision_mixin, "loss_scale", 1.0)  # 1 unless fp16

        def record_then_scale() -> float:
            scale: float = combined_scale()
            record(optimizer._current_grad_norm / loss_scale)
            return scale

        optimizer._get_combined_scale = record_then_scale
        try:
            yield
        finally:
            del optimizer._get_combined_scale
            self._drop(optimizer)

    def drop_gradients(self, trained: TrainedModel) -> None:
        self._drop(trained.optimizer)

    def _drop(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        optimizer.chunk_manager.accumulating_grads = False  # the next backward pass overwrites the chunks

    def _weights(self, prepared: Prepared) -> ChunkWeights:
        return ChunkWeights(prepared.trained.model, prepared.trained.optimizer)

    def _whole_weight(self, prepared: Prepared | None, name: str, tensor: Tensor) -> Tensor:
        if prepared is None or name not in prepared.parameters:
            return tensor
        with self.group.guard(f"the parts of {name}"):
            return self._weights(prepared).whole(prepared.parameters[name])

    def _put_weight(self, prepared: Prepared | None, name: str, target: Tensor, value: Tensor) -> None:
        if prepared is None or name not in prepared.parameters:
            target.copy_(value)
        else:
            self._weights(prepared).put(prepared.parameters[name], value)

    def _optimizer_entries(self, prepared: Prepared) -> Iterator[tuple[str, dict[str, Any]]]:
        weights = self._weights(prepared)
        names = [name for group in prepared.names for name in group]
        local = {name: weights.state_keys(index) for index, name in enumerate(names)}
        everywhere = self.all_gather_objects(local)
        for index, name in enumerate(names):
            keys: dict[str, int | None] = next((kinds[name] for kinds in everywhere if kinds[name]), {})
            if keys:
                with self.group.guard(f"the optimizer state of {name}"):
                    yield (
                        name,
                        {
                            key: step
                            if step is not None
                            else weights.whole_state(index, key, prepared.parameters[name])
                            for key, step in keys.items()
                        },
                    )

    def _put_optimizer_entry(self, prepared: Prepared, name: str, values: dict[str, Any]) -> None:
        names = [each for group in prepared.names for each in group]
        self._weights(prepared).put_state(names.index(name), values)


def _bound(max_grad_norm: float | None) -> float:
    return math.inf if max_grad_norm is None else max_grad_norm
