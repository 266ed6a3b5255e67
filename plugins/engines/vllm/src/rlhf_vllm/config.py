"""Options of the engine `vllm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core.config import Problem, ResolvedRun
from rlhf_forward import ShapedEngineConfig
from rlhf_models import truncation_problem

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's memory for the factors of an adapter (`max_lora_rank`)."""
INSTALL = "make setup-vllm (without a GPU), or pip install vllm==0.32.0 (CUDA)"
"""Hint for users if vLLM is missing or broken."""


class VllmEngineConfig(ShapedEngineConfig):
    """Rollouts with vLLM."""

    removed: ClassVar[Mapping[str, str]] = {
        "in_process": "vLLM always runs in a separate process: remove it",
        "sleep_level": "in sleep the weights always move to host memory: remove it",
    }

    max_batch_size: int = Field(64, ge=1, le=4096, description="Sequences decoded at once (vLLM's max_num_seqs).")
    max_model_tokens: int | None = Field(
        None, ge=2, description="Maximum length of prompt and answer together. null: the model's maximum."
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1024**2,
        description="Memory for keys and values. null: 1 GiB on a CPU, the rest of gpu_memory_fraction on a GPU.",
    )
    gpu_memory_fraction: float = Field(
        0.4,
        gt=0,
        le=1,
        description="Fraction of each GPU's memory that vLLM uses, weights and key-value cache together (vLLM's "
        "gpu_memory_utilization).",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of GPUs that split every layer, which a maker must reserve (transport.maker_gpus). While "
        "they load a new version, shared memory holds all of it.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="torch.compile and CUDA graphs. auto: on a GPU only, since they add seconds to the start.",
    )
    sleep: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Release vLLM's memory between rollouts: the key-value cache is dropped, weights move to host "
        "memory. auto: on a GPU. vLLM's CPU build cannot, and keeps kv_cache_bytes.",
    )
    max_shard_bytes: int = Field(
        512 * 1024**2, ge=1024, description="Maximum size of the pieces in which vLLM gets new weights (or one tensor)."
    )
    adapter: bool = Field(
        False,
        description="With model.lora: load the frozen weights once, and at each version the adapter alone, which vLLM "
        "applies (LoRARequest). False merges it into the weights, which are loaded again at each version.",
    )
    start_timeout_seconds: float = Field(600.0, gt=0, le=86400, description="Maximum wait for vLLM to start.")
    answer_timeout_seconds: float = Field(
        600.0,
        gt=0,
        le=86400,
        description="Maximum wait for one decoding step of vLLM, or for one piece of weights to load.",
    )

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        if not self.adapter:
            return
        lora = run.run.model.lora
        if lora is None:
            yield Problem("adapter", "needs an adapter, but model.lora is not set", "set model.lora or adapter: false")
        elif lora.dora:
            yield Problem("adapter", "vLLM cannot apply an adapter with model.lora.dora", "set adapter: false")
        elif lora.r > LORA_RANKS[-1]:
            problem = f"vLLM applies adapters up to rank {LORA_RANKS[-1]}, not {lora.r}"
            yield Problem("adapter", problem, "set adapter: false")

    @model_validator(mode="after")
    def _check_truncation(self) -> VllmEngineConfig:
        if problem := truncation_problem(self.top_k, self.top_p, engine="vllm"):
            raise ValueError(problem)
        if problem := min_p_problem(self.top_k, self.min_p) or temperature_problem(self.temperature):
            raise ValueError(problem)
        return self

    def min_p_problem(self) -> str | None:
        return min_p_problem(self.top_k, 0.5)


def min_p_problem(top_k: int, min_p: float) -> str | None:
    """Return the reason why vLLM cannot report the tokens that min-p keeps, or None."""
    needs_top_k = min_p > 0 and top_k == 0
    return "min_p needs top_k (1 to 1024) with the engine vllm. Set it, or use the engine hf" if needs_top_k else None


def temperature_problem(temperature: float) -> str | None:
    """Return the reason why vLLM would sample at another temperature, or None."""
    if 0.01 <= temperature <= 2.0:
        return None
    return f"the temperature {temperature:g} is outside 0.01 to 2, which vLLM changes or refuses. Use the engine hf"
