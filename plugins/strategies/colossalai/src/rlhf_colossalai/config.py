"""Options of the strategies `ddp`, `low-level-zero` and `gemini`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_strategies import ShardingConfig, TorchDdpConfig

_PRECISION_HELP = "Type of the arithmetic. auto: fp32 on a CPU, bf16 on a GPU, never fp16."
_FIXED = "it has a fixed value now that suits all runs: remove it"
_MASTERS = "fp32 weights are always kept in addition to bf16 and fp16 ones, for small steps: remove it"


class DdpConfig(TorchDdpConfig):
    """`strategy:` section for `name: ddp`."""

    removed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "broadcast_buffers"), _FIXED
    )


class LowLevelZeroConfig(ShardingConfig):
    """`strategy:` section for `name: low-level-zero`."""

    removed: ClassVar[Mapping[str, str]] = {
        "master_weights": _MASTERS,
        **dict.fromkeys(
            ("initial_scale", "reduce_bucket_size_in_m", "communication_precision", "overlap_communication"), _FIXED
        ),
    }

    stage: Literal[1, 2] = Field(
        default=1,
        description="State to shard. 1: optimizer state. 2: also gradients (reduced at every micro-batch).",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(default="auto", description=_PRECISION_HELP)
    cpu_offload: bool = Field(
        default=False, description="Keep master weights and optimizer state in host memory. Needs a GPU."
    )


def _no_fp32(value: object) -> object:
    if value == "fp32":
        raise ValueError("gemini does not support fp32: use bf16, or fp32 with low-level-zero or torch-ddp")
    return value


class GeminiConfig(ShardingConfig):
    """`strategy:` section for `name: gemini`."""

    removed: ClassVar[Mapping[str, str]] = {
        "master_weights": _MASTERS,
        "placement_policy": "chunks are placed by fractions now: use offload_optim_frac and offload_param_frac",
        **dict.fromkeys(
            (
                "initial_scale",
                "warmup_non_model_data_ratio",
                "steady_cuda_cap_ratio",
                "gpu_margin_mem_ratio",
                "max_prefetch",
                "min_chunk_size_m",
                "search_range_m",
                "pin_memory",
            ),
            _FIXED,
        ),
    }

    precision: Annotated[Literal["auto", "bf16", "fp16"], BeforeValidator(_no_fp32)] = Field(
        default="auto", description="Type of weights and arithmetic. auto: bf16. fp32 is not supported."
    )
    shard_param_frac: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of the weights that is sharded (1 = ZeRO-3)."
    )
    offload_optim_frac: float = Field(
        default=0.0, ge=0, le=1, description="Fraction of optimizer state kept in host memory. Needs a GPU."
    )
    offload_param_frac: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of weights kept in host memory. Needs a GPU, and the other two fractions at 1.",
    )

    @model_validator(mode="after")
    def _offloads_weights_last(self) -> GeminiConfig:
        if self.offload_param_frac > 0 and (self.shard_param_frac < 1 or self.offload_optim_frac < 1):
            raise ValueError(
                "offload_param_frac needs shard_param_frac: 1 and offload_optim_frac: 1 "
                "(weights go to host memory only after everything else)"
            )
        return self
