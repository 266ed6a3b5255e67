"""Options that strategies of several processes share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config import StrategyConfig


class KernelsConfig(StrategyConfig):
    """Base of the `strategy:` section of a strategy whose models may use other kernels."""

    liger: bool = Field(
        default=False,
        description="Compute norms, rotary embeddings and MLPs with Liger's Triton kernels. Needs a GPU and "
        "`pip install 'rlhf-torch[cuda]'`.",
    )


class ProcessesConfig(StrategyConfig):
    """Base of the `strategy:` section of a strategy for several processes."""

    timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Maximum wait for another process before the run ends with an error that names it.",
    )


class TorchDdpConfig(ProcessesConfig, KernelsConfig):
    """`strategy:` section for `name: torch-ddp`, and base of ColossalAI's `ddp`."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Type of the arithmetic. auto: fp32 on a CPU, bf16 on a GPU, never fp16. Weights stay fp32.",
    )
    find_unused_parameters: bool = Field(
        default=False, description="Detect parameters that did not receive a gradient. Slower, needed by few models."
    )
