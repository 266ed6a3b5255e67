"""Options of the strategies `ddp`, `low-level-zero` and `gemini`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.config import Section

_PRECISION_HELP = "Type of the arithmetic. auto: fp32 on a CPU, bf16 on a GPU, never fp16."


class _Processes(Section):
    timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Longest wait for another process before the run ends with an error that names it.",
    )


class DdpConfig(_Processes):
    """`strategy:` section for `name: ddp`."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description=_PRECISION_HELP + " Weights stay fp32."
    )
    bucket_cap_mb: int = Field(default=25, ge=1, le=4096, description="Gradients are averaged in buckets of this size.")
    gradient_as_bucket_view: bool = Field(
        default=True, description="Gradients live in the buckets themselves, which saves a copy of them."
    )
    find_unused_parameters: bool = Field(
        default=False, description="Look for parameters that got no gradient; slower, needed by few models."
    )
    static_graph: bool = Field(
        default=False, description="Promise that every update uses the same graph; not with several micro-batches."
    )
    broadcast_buffers: bool = Field(default=False, description="Copy rank 0's buffers to all before each forward.")


class ZeroConfig(_Processes):
    """Options that `low-level-zero` and `gemini` share."""

    master_weights: bool = Field(
        default=True, description="Keep sharded fp32 weights in the optimizer beside the bf16 or fp16 ones."
    )
    initial_scale: float = Field(default=2.0**16, ge=1, le=2.0**32, description="First loss scale; used in fp16 only.")


class LowLevelZeroConfig(ZeroConfig):
    """`strategy:` section for `name: low-level-zero`."""

    stage: Literal[1, 2] = Field(
        default=1,
        description="What is sharded: 1 optimizer state, 2 also gradients (reduced at every micro-batch).",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(default="auto", description=_PRECISION_HELP)
    reduce_bucket_size_in_m: int = Field(
        default=12, ge=1, le=4096, description="Gradients are reduced in buckets of this many million elements."
    )
    communication_precision: Literal["same", "fp32", "bf16", "fp16"] = Field(
        default="same", description="Type gradients travel in; `same` is their own."
    )
    overlap_communication: bool = Field(
        default=True, description="Reduce gradients while the backward runs. GPU only: off on a CPU."
    )
    cpu_offload: bool = Field(
        default=False, description="Keep master weights and optimizer state in host memory. Needs a GPU."
    )

    @model_validator(mode="after")
    def _offload_needs_master_weights(self) -> LowLevelZeroConfig:
        if self.cpu_offload and not self.master_weights:
            raise ValueError(
                "cpu_offload moves the master weights to host memory, but master_weights is false; "
                "set master_weights: true or cpu_offload: false"
            )
        return self


def _no_fp32(value: object) -> object:
    if value == "fp32":
        raise ValueError("gemini has no fp32; use bf16, or fp32 with `--strategy low-level-zero` or `ddp`")
    return value


class GeminiConfig(ZeroConfig):
    """`strategy:` section for `name: gemini`."""

    precision: Annotated[Literal["auto", "bf16", "fp16"], BeforeValidator(_no_fp32)] = Field(
        default="auto", description="Type of weights and arithmetic. auto: bf16 everywhere; gemini has no fp32."
    )
    placement_policy: Literal["static", "auto"] = Field(
        default="static",
        description="Where chunks live: static follows the fractions below; auto follows memory use. auto needs a GPU, "
        "and its first pass must be a training pass, as in sft and dpo: no log-probs are taken before.",
    )
    shard_param_frac: float = Field(
        default=1.0, ge=0, le=1, description="Static only: fraction of the weights that is sharded (1 = ZeRO-3)."
    )
    offload_optim_frac: float = Field(
        default=0.0, ge=0, le=1, description="Static only: fraction of optimizer state kept in host memory."
    )
    offload_param_frac: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Static only: fraction of weights kept in host memory; needs the other two fractions at 1.",
    )
    warmup_non_model_data_ratio: float = Field(
        default=0.8, gt=0, lt=1, description="Auto only: GPU memory left to activations in the first iteration."
    )
    steady_cuda_cap_ratio: float = Field(
        default=0.9, gt=0, le=1, description="Auto only: GPU memory that may be used from the second iteration on."
    )
    gpu_margin_mem_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Auto only: GPU memory left over that optimizer state may use."
    )
    max_prefetch: int = Field(default=0, ge=0, le=64, description="Chunks gathered ahead of use. Needs a GPU.")
    min_chunk_size_m: float = Field(
        default=32.0, gt=0, le=4096, description="Smallest chunk, in million elements (2^20)."
    )
    search_range_m: int = Field(
        default=32, ge=1, le=4096, description="Range in which the chunk size is searched, in million elements (2^20)."
    )
    pin_memory: bool = Field(default=True, description="Pin the host memory of offloaded chunks. Off on a CPU.")

    @model_validator(mode="after")
    def _placement_fits_fractions(self) -> GeminiConfig:
        if self.placement_policy == "auto":
            for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is only for placement_policy: static; remove it, or change the policy")
        elif self.gpu_margin_mem_ratio > 0:
            raise ValueError("gpu_margin_mem_ratio is only for placement_policy: auto; remove it, or change the policy")
        elif self.offload_param_frac > 0 and (self.shard_param_frac < 1 or self.offload_optim_frac < 1):
            raise ValueError(
                "offload_param_frac needs shard_param_frac: 1 and offload_optim_frac: 1 "
                "(weights go to host memory only after everything else)"
            )
        return self
