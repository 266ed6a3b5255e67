"""Options of the engine `vllm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core.config import EngineConfig

INSTALL = "make setup-vllm (without a GPU), or pip install vllm==0.32.0 (CUDA)"
"""Hint for the user when vLLM is missing or broken."""
MAX_TOP_K = 1024
"""Most tokens whose log-probs are requested of vLLM at each position."""


class VllmEngineConfig(EngineConfig):
    """Rollouts by vLLM."""

    removed: ClassVar[Mapping[str, str]] = {
        "in_process": "vLLM always runs in a process of its own; remove it",
        "sleep_level": "in sleep the weights move to host memory; remove it",
    }

    max_batch_size: int = Field(64, ge=1, le=4096, description="Sequences decoded at once (vLLM's max_num_seqs).")
    max_model_tokens: int | None = Field(
        None, ge=2, description="Longest prompt and answer together; null is what the model has positions for."
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1024**2,
        description="Memory for keys and values; null is 1 GiB on a CPU and what gpu_memory_fraction leaves on a GPU.",
    )
    gpu_memory_fraction: float = Field(
        0.4,
        gt=0,
        le=1,
        description="Part of each GPU's memory that vLLM takes, weights and key-value cache together (vLLM's "
        "gpu_memory_utilization).",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="GPUs that each hold a part of every layer. A maker needs as many (transport.maker_gpus); a new "
        "version then lies in shared memory as a whole while they load it.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="torch.compile and captured graphs: auto has them on a GPU only, where they pay for the seconds "
        "that they take to start.",
    )
    sleep: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Give vLLM's memory back between rollouts: the key-value cache is dropped, weights move to host "
        "memory. auto does it on a GPU; vLLM's CPU build cannot, and keeps kv_cache_bytes.",
    )
    max_shard_bytes: int = Field(
        512 * 1024**2, ge=1024, description="New weights reach vLLM in pieces of at most this size (or one tensor)."
    )
    start_timeout_seconds: float = Field(600.0, gt=0, le=86400, description="Longest wait for vLLM to start.")
    answer_timeout_seconds: float = Field(
        600.0,
        gt=0,
        le=86400,
        description="Longest wait for a step of vLLM, or for a piece of weights to load.",
    )

    @model_validator(mode="after")
    def _kept_tokens_are_told(self) -> VllmEngineConfig:
        if problem := truncation_problem(self.top_k, self.top_p):
            raise ValueError(problem)
        return self


def truncation_problem(top_k: int, top_p: float) -> str | None:
    """Why vLLM could not report which tokens were sampled from; None when it can.

    The update needs the whole set of kept tokens, and vLLM reports only the likeliest `top_k`.
    """
    if top_k > MAX_TOP_K:
        return f"top_k is at most {MAX_TOP_K} with the engine vllm"
    if top_p < 1 and top_k == 0:
        return f"top_p needs top_k (1 to {MAX_TOP_K}) beside it with the engine vllm; or use the engine hf"
    return None
