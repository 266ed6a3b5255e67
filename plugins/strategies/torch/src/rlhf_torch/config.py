"""Options of the strategies `single` and `fsdp`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SingleConfig(BaseModel):
    """`strategy:` section for `name: single`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Type of the arithmetic; weights stay fp32. auto: fp32 on a CPU, bf16 on a GPU, never fp16.",
    )


class FsdpConfig(BaseModel):
    """`strategy:` section for `name: fsdp`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Type of the arithmetic; sharded weights stay fp32. auto: fp32 on a CPU, bf16 on a GPU.",
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
    timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Longest wait for another process before the run ends with an error that names it.",
    )
