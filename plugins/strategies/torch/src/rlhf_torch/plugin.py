"""Strategy components of this distribution. Imports only pydantic and core."""

from rlhf_core.components import Component
from rlhf_strategies import TorchDdpConfig

from .config import FsdpConfig, SingleConfig

single = Component(
    summary="One process: AdamW, mixed precision, on a CPU or one GPU",
    config=SingleConfig,
    build="rlhf_torch.single:SingleStrategy",
    max_processes=1,
)

torch_ddp = Component(
    summary="PyTorch's DistributedDataParallel: full model in every process, gradients are averaged",
    config=TorchDdpConfig,
    build="rlhf_strategies.torch_ddp:TorchDdpStrategy",
)

fsdp = Component(
    summary="PyTorch's fully_shard (FSDP2): weights, gradients and optimizer state sharded over processes",
    config=FsdpConfig,
    build="rlhf_torch.fsdp:FsdpStrategy",
)
