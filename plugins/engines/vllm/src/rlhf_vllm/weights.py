"""A policy's weights as vLLM loads them: plain transformers names, LoRA increments merged, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from rlhf_core.models import is_lora, merged_weights
from rlhf_core.rollout import named_weights
from rlhf_core.util import group_into_shards


def plain_shards(module: nn.Module, max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Shards of at most `max_shard_bytes` (or one tensor); tied tensors once.

    Under LoRA each shard is the base and the increments of today added once: nothing accumulates, `module` is
    unchanged, and no more than one shard is held twice.
    """
    weights = named_weights(module)
    if not is_lora(module):
        yield from group_into_shards(weights.items(), max_shard_bytes)
        return
    increments = {name: tensor for name, tensor in weights.items() if "lora_" in name}
    others = ((name, tensor) for name, tensor in weights.items() if name not in increments)
    for shard in group_into_shards(others, max_shard_bytes):
        yield {name: tensor.detach() for name, tensor in merged_weights(module, shard | increments).items()}
