"""Options of the strategies `single` and `fsdp`. Those of `torch-ddp` are in `rlhf_strategies`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_strategies import KernelsConfig, ShardingConfig

_PROCESSES_OF_A_MACHINE = 8


class SingleConfig(KernelsConfig):
    """`strategy:` section for `name: single`."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Type of the arithmetic. Weights stay fp32. auto: fp32 on a CPU, bf16 on a GPU, never fp16.",
    )


class FsdpConfig(ShardingConfig, KernelsConfig):
    """`strategy:` section for `name: fsdp`."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Type of the arithmetic. Sharded weights stay fp32. auto: fp32 on a CPU, bf16 on a GPU.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of processes per group. A group splits each block's matrices and computes every row "
        "together, and groups share the rows. Must divide the numbers of processes and key-value heads.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="With tensor_parallel, also split the operations between the matrices over positions: less memory "
        "for activations, the same amount of communication.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free a block's gathered weights after its forward and gather them again for its backward: "
        "less memory, more communication (ZeRO-3). False keeps them (ZeRO-2).",
    )
    offload: bool = Field(
        default=False,
        description="Keep sharded weights, gradients and optimizer state in host memory. Needs a GPU.",
    )

    def processes_per_rank(self) -> int:
        return self.tensor_parallel

    def layouts(self, num_processes: int) -> Iterator[dict[str, Any]]:
        """Options to try in `rlhf plan`: smallest groups first, up to the processes of one machine."""
        for size in range(1, min(num_processes, _PROCESSES_OF_A_MACHINE) + 1):
            if num_processes % size == 0:
                yield {"tensor_parallel": size, "sequence_parallel": False}
                if size > 1:
                    yield {"tensor_parallel": size, "sequence_parallel": True}

    @model_validator(mode="after")
    def _sequence_needs_tensor_parallel(self) -> FsdpConfig:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor parallelism: set tensor_parallel above 1")
        if self.liger and self.tensor_parallel > 1:
            raise ValueError("liger does not support split matrices: set tensor_parallel to 1")
        return self
