"""Options that strategies of several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlhf_core.config import Problem, StrategyConfig

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun


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


class ShardingConfig(ProcessesConfig):
    """Base of the `strategy:` section of a strategy that shards or rewrites the weights of a model."""

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if (kind := run.run.model.quantize) is not None:
            problem = f"cannot divide or rewrite the {kind} weights of model.quantize"
            yield Problem("name", f"{run.strategy.name} {problem}", "use strategy single, torch-ddp or ddp")


class TorchDdpConfig(ProcessesConfig, KernelsConfig):
    """`strategy:` section for `name: torch-ddp`, and base of ColossalAI's `ddp`."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Type of the arithmetic. auto: fp32 on a CPU, bf16 on a GPU, never fp16. Weights stay fp32.",
    )
    find_unused_parameters: bool = Field(
        default=False, description="Detect parameters that did not receive a gradient. Slower, needed by few models."
    )
