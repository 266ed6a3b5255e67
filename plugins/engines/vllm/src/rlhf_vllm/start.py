"""Starts vLLM: its import and its arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, PluginError

from .config import INSTALL, MAX_TOP_K, VllmEngineConfig

WHERE = "engine vllm"
CPU_CACHE_BYTES = 1024**3
SHARED_MEMORY = Path("/dev/shm")
TIES = 16
"""Tokens requested beyond `top_k`: those tied with the last kept one are kept too."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that vLLM is started with; sent to its process."""

    config: VllmEngineConfig
    folder: Path
    """A transformers config and tokenizer, without weights: these come by `update`."""
    dtype: str
    device: str
    """`cpu`, or `cuda`: the first one this process sees."""
    eos_ids: tuple[int, ...]
    in_flight: bool = False
    """Whether weights change while answers are under way."""


def scratch_folder() -> Path | None:
    """Where weights are handed over as files: shared memory, or the system's folder (None) where there is none."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None


def described(error: BaseException) -> str:
    """The error's type and first line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def engine_args(settings: Settings, sleeps: bool) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`."""
    config, on_cpu = settings.config, settings.device == "cpu"
    return {
        "model": str(settings.folder),
        "tokenizer": str(settings.folder),
        "dtype": settings.dtype,
        "load_format": "dummy",
        "generation_config": "vllm",  # ignore the model's own sampling defaults
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that was sampled from
        "max_logprobs": MAX_TOP_K + TIES,
        "max_num_seqs": config.max_batch_size,
        "max_model_len": config.max_model_tokens,
        "kv_cache_memory_bytes": config.kv_cache_bytes or (CPU_CACHE_BYTES if on_cpu else None),
        "gpu_memory_utilization": config.gpu_memory_fraction,
        "enforce_eager": config.compile == "off" or (config.compile == "auto" and on_cpu),
        "enable_sleep_mode": sleeps,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "disable_log_stats": True,
        # A step that is ahead of its output would have sampled with the weights before those it is told with.
        **({"async_scheduling": False} if settings.in_flight else {}),
    }


def can_sleep(settings: Settings) -> bool:
    """Whether vLLM is to sleep between rollouts. Raises where that is requested but this build cannot."""
    from vllm.platforms import current_platform

    if settings.device.startswith("cuda") and current_platform.is_cpu():
        raise PluginError(
            "the policy is on a GPU, but the vLLM that is installed is the CPU build", where=WHERE, hint=INSTALL
        )
    can = bool(current_platform.is_sleep_mode_available())
    if settings.config.sleep == "on" and not can:
        raise ConfigError(
            "this build of vLLM cannot give its memory back", where="engine.sleep", hint="set it to auto or off"
        )
    return can and settings.config.sleep != "off"


def import_vllm() -> Any:
    """The module. Raises `PluginError`, with a hint, when its import fails."""
    try:
        import vllm
        import vllm.sampling_params
    except Exception as error:  # a torchvision or triton of another build fails in its own ways
        raise PluginError(f"vLLM is installed but broken: {described(error)}", where=WHERE, hint=INSTALL) from error
    return vllm
