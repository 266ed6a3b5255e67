"""Import of vLLM and its start arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.errors import ConfigError, PluginError
from rlhf_models import MAX_TOP_K, TIES

from .config import INSTALL, LORA_RANKS, VllmEngineConfig

WHERE = "engine vllm"
CPU_CACHE_BYTES = 1024**3
SHARED_MEMORY = Path("/dev/shm")
_IMAGE_ARGS: Mapping[str, Any] = {
    "limit_mm_per_prompt": {"video": 0},  # its processors of videos need torchvision
    "mm_processor_cache_gb": 0,  # images arrive processed
    "mm_device_do_normalize": False,  # and normalized
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for starting vLLM, sent to its process."""

    config: VllmEngineConfig
    folder: Path
    """Transformers config and tokenizer, and with `lora_rank` the frozen weights. Others are sent by `update`."""
    dtype: str
    device: str
    """`cpu`, or `cuda` for the first visible GPU."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer: each EOS, and the image token."""
    lora_rank: int | None = None
    """Rank of the adapter that `load_adapter` sends. None if adapters are merged into the weights."""
    in_flight: bool = False
    """Whether weights may change while answers are sampled."""
    model_type: str = ""
    """`model_type` of the config."""
    image_token_id: int | None = None
    """Token that features of images replace. None for a model without images."""


def scratch_folder() -> Path | None:
    """Folder for passing weights as files: shared memory, or None for the system's default temporary folder."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None


def describe_error(error: BaseException) -> str:
    """Type and first line of an error. The first line of a `ValidationError` is only its number of problems."""
    lines = (str(error).strip() or "no message").splitlines()
    return (
        f"{type(error).__name__}: {' '.join(map(str.strip, lines[: 3 if isinstance(error, ValidationError) else 1]))}"
    )


def engine_args(settings: Settings, sleeps: bool) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`."""
    config, on_cpu = settings.config, settings.device == "cpu"
    return {
        "model": str(settings.folder),
        "tokenizer": str(settings.folder),
        "dtype": settings.dtype,
        "load_format": "dummy" if settings.lora_rank is None else "safetensors",
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
        **_lora_args(settings.lora_rank),
        **({} if settings.image_token_id is None else _IMAGE_ARGS),
        # With asynchronous scheduling, tokens would be attributed to newer weights than those that sampled them.
        **({"async_scheduling": False} if settings.in_flight else {}),
    }


def _lora_args(rank: int | None) -> dict[str, Any]:
    if rank is None:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(each for each in LORA_RANKS if each >= rank)}


def can_sleep(settings: Settings) -> bool:
    """Whether vLLM should sleep between rollouts.

    Raises `ConfigError` if `sleep: on` requests it and this build cannot, and `PluginError` if the policy is on a GPU
    but vLLM is the CPU build.
    """
    from vllm.platforms import current_platform

    if settings.device.startswith("cuda") and current_platform.is_cpu():
        raise PluginError("the policy is on a GPU, but the CPU build of vLLM is installed", where=WHERE, hint=INSTALL)
    can = bool(current_platform.is_sleep_mode_available())
    if settings.config.sleep == "on" and not can:
        raise ConfigError(
            "this build of vLLM cannot release its memory", where="engine.sleep", hint="set it to auto or off"
        )
    return can and settings.config.sleep != "off"


def import_vllm() -> Any:
    """Import vLLM. Raises `PluginError`, with a hint, if the import fails."""
    try:
        import vllm
        import vllm.sampling_params
    except Exception as error:  # mismatched builds of torchvision or triton raise various errors
        raise PluginError(
            f"vLLM is installed but broken: {describe_error(error)}", where=WHERE, hint=INSTALL
        ) from error
    return vllm
