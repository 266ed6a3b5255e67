"""Inference outside a run, for `rlhf serve` and for a judge in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rlhf_core.components import EngineContext
from rlhf_core.config import ModelConfig
from rlhf_core.models import model_kind_for
from rlhf_core.place import resolve_device
from rlhf_core.plugins import load
from rlhf_core.protocols import RolloutEngine

from .ended_thread import call_in_ended_thread

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class OpenEngine(NamedTuple):
    """An engine with the model that it samples from."""

    engine: RolloutEngine
    """The engine. Its caller closes it."""
    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer."""
    policy: nn.Module
    """The model, for other forward passes while the engine does not run."""


def open_engine(
    config: ModelConfig,
    engine: str,
    seed: int,
    *,
    options: Mapping[str, Any] | None = None,
    in_flight: bool = False,
) -> OpenEngine:
    """Load a model and open an engine on it, in float32 on a CPU and bfloat16 on a GPU.

    Args:
        config: the `model:` section of a run file.
        engine: name of the engine plugin.
        seed: seed of the run, for sampling and for weights that are not in the files.
        options: the engine's options.
        in_flight: whether `generate_in_flight` will be called, if the engine supports it.

    Returns:
        The engine, the model's tokenizer, and the model.
    """
    import torch

    selected, kind = load("engines", engine), model_kind_for(config)
    kind.check()
    tokenizer, device = kind.load_tokenizer(), resolve_device(config.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    # An `EngineThread` may use it.
    policy = call_in_ended_thread(lambda: kind.load_policy(dtype=dtype, seed=seed, tokenizer=tokenizer))
    policy = policy.to(device).eval()
    context = EngineContext(
        policy,
        tokenizer,
        device,
        seed,
        model_path=config.path,
        in_flight=in_flight and selected.component.in_flight,
    )
    built = selected.build(selected.component.config.model_validate(dict(options or {})), context)
    return OpenEngine(cast(RolloutEngine, built), tokenizer, policy)
