"""Save a trained actor and critic as folders for `from_pretrained`. Collective. Rank 0 writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlhf_core.strategy import Strategy
from rlhf_models import is_lora, write_transformers_folder

from ..critic import PEFT_PREFIX, Critic

_SHARD_BYTES = 512 * 1024**2


def save_actor(strategy: Strategy, model: nn.Module, path: Path) -> None:
    """Write a folder for `AutoModelForCausalLM.from_pretrained`, with any LoRA adapter merged, without a tokenizer."""
    weights, inner = _gather(strategy, model), strategy.unwrap(model)
    strategy.run_on_main(lambda: write_transformers_folder(inner, weights, path))


def save_critic(strategy: Strategy, model: nn.Module, path: Path) -> None:
    """Write a folder for `Critic.from_pretrained`, LoRA merged. Other value models are written for `load_model`."""
    inner: Any = strategy.unwrap(model)
    critic = inner.get_base_model() if is_lora(inner) else inner
    if not isinstance(critic, Critic):
        strategy.save_model(model, path)
        return
    weights = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in _gather(strategy, model).items()}
    strategy.run_on_main(lambda: critic.save_pretrained(path, weights))


def _gather(strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
    """Gather the full weights in CPU memory on rank 0. Other ranks take part in the gather and return nothing."""
    weights: dict[str, Tensor] = {}
    for shard in strategy.state_dict_shards(model, _SHARD_BYTES):
        if strategy.is_main:
            weights.update({name: tensor.detach().cpu().clone() for name, tensor in shard.items()})
    return weights
