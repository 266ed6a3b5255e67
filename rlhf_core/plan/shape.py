"""Model sizes from the config alone: the model is built on torch's meta device, which holds no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.sections import LoraConfig, ModelConfig
from ..errors import UserInputError
from ..models.builtin import PREFIX, build_builtin
from ..models.config_check import check_layers
from ..models.hub import check_hub

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that memory and time depend on."""

    num_parameters: int
    num_trainable: int
    head_parameters: int
    """Parameters of the output layer, which a value model lacks; 0 where it is tied to the embedding."""
    num_layers: int
    hidden_size: int
    feed_forward_size: int
    vocabulary: int
    kv_values_per_token: int
    """Values in the key-value cache per token, over all layers."""


def model_shape(config: ModelConfig, model: nn.Module | None = None) -> ModelShape:
    """The shape of `model.path` with its LoRA adapter. Raises `UserInputError` where its config cannot be read.

    model: what `meta_model` made of the config, where it is at hand.
    """
    model = meta_model(config) if model is None else model
    inner: Any = model.config
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(parameters.values())
    adapter = 0 if config.lora is None else _lora_parameters(model, config.lora)
    heads = int(inner.num_attention_heads)
    head_size = int(getattr(inner, "head_dim", None) or inner.hidden_size // heads)
    kv_heads = int(getattr(inner, "num_key_value_heads", None) or heads)
    layers = int(inner.num_hidden_layers)
    return ModelShape(
        num_parameters=total + adapter,
        num_trainable=adapter if config.lora is not None else total,
        head_parameters=sum(count for name, count in parameters.items() if name.startswith("lm_head")),
        num_layers=layers,
        hidden_size=int(inner.hidden_size),
        feed_forward_size=int(getattr(inner, "intermediate_size", None) or 4 * inner.hidden_size),
        vocabulary=int(inner.vocab_size),
        kv_values_per_token=2 * layers * kv_heads * head_size,
    )


def meta_model(config: ModelConfig) -> nn.Module:
    """`model.path` without its weights, frozen where an adapter is trained beside them.

    Raises `UserInputError` where its config cannot be read.
    """
    return _meta_model(config).requires_grad_(config.lora is None)


def _meta_model(config: ModelConfig) -> nn.Module:
    if config.path.startswith(PREFIX):
        return build_builtin(config.path, 0)[0]  # made in code, and tiny
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = config.path
    adapter = Path(path) / "adapter_config.json"
    if adapter.exists():
        path = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    check_layers(Path(path), "model.path")
    check_hub(path, where="model.path")
    try:
        described = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # the class depends on the model's own code
        raise UserInputError(
            f"its config cannot be read: {str(error).splitlines()[0]}", where=f"model.path {path}"
        ) from error
    return model


def _lora_parameters(model: nn.Module, config: LoraConfig) -> int:
    from torch import nn

    return sum(
        config.r * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not name.startswith("lm_head")
        and (config.target_modules is None or name.rpartition(".")[2] in config.target_modules)
    )
