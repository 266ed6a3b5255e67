"""A model that only answers, outside a run: for `rlhf generate`, `rlhf eval` and `rlhf serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ..components import EngineContext
from ..config.sections import ModelConfig
from ..models.kinds import kind_for
from ..place import resolve_device
from ..plugins.selected import load
from ..protocols import RolloutEngine

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def open_engine(
    config: ModelConfig,
    engine: str,
    seed: int,
    *,
    options: Mapping[str, Any] | None = None,
    in_flight: bool = False,
) -> tuple[RolloutEngine, PreTrainedTokenizerBase]:
    """An engine over a model that is loaded for it.

    options: the engine's. in_flight: call `generate_in_flight` if the engine has it.
    """
    selected = load("engines", engine)
    policy, tokenizer, place = load_for_inference(config, seed)
    context = EngineContext(
        policy,
        tokenizer,
        place,
        seed,
        model_path=config.path,
        in_flight=in_flight and selected.component.in_flight,
    )
    built = selected.build(selected.component.config.model_validate(dict(options or {})), context)
    return cast(RolloutEngine, built), tokenizer


def load_for_inference(config: ModelConfig, seed: int) -> tuple[nn.Module, PreTrainedTokenizerBase, torch.device]:
    """A model that only answers, in float32 on a CPU and bfloat16 on a GPU, its tokenizer, and where it is."""
    import torch

    kind = kind_for(config)
    kind.check()
    tokenizer = kind.load_tokenizer()
    place = resolve_device(config.device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    policy = kind.load_policy(dtype=dtype, seed=seed, tokenizer=tokenizer)
    return policy.to(place).eval(), tokenizer, place
