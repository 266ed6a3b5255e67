"""Strategy components of this distribution. Imports only pydantic and core."""

from rlhf_core.components import Component

from .config import FsdpConfig, SingleConfig

single = Component(
    summary="One process: AdamW, mixed precision, on a CPU or one GPU",
    config=SingleConfig,
    build="rlhf_torch.single:SingleStrategy",
    max_processes=1,
)

fsdp = Component(
    summary="PyTorch's fully_shard (FSDP2): weights, gradients and optimizer state sharded over processes",
    config=FsdpConfig,
    build="rlhf_torch.fsdp:FsdpStrategy",
)
