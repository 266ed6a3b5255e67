"""Sizes of a model that is built without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config import ModelConfig
from rlhf_models import changes_base, quantized_sizes

from .meta import meta_model

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Quantized:
    """Weights in 4 or 8 bits."""

    num_parameters: int = 0
    num_bytes: int = 0
    """Size of the weights and their scales."""
    largest: int = 0
    """Number of weights of the largest layer, which is dequantized for its products."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that memory depends on."""

    num_parameters: int
    num_trainable: int
    head_parameters: int
    """Number of parameters of the output layer, which a value model lacks. 0 if it is tied to the embedding."""
    num_layers: int
    hidden_size: int
    feed_forward_size: int
    vocabulary: int
    kv_values_per_token: int
    """Number of values in the key-value cache per token, over all layers."""
    quantized: Quantized
    """The weights that `model.quantize` keeps in fewer bits, which are among `num_parameters`."""


def model_shape(config: ModelConfig, model: nn.Module | None = None) -> ModelShape:
    """Return the sizes of `model.path` with its LoRA adapter. Raises `UserInputError` if its config cannot be read.

    Args:
        config: the section `model` of a run.
        model: the result of `meta_model`. None builds it.
    """
    model = meta_model(config) if model is None else model
    config_of: Any = model.config
    inner: Any = config_of.get_text_config()  # a model that sees has a config for each of its parts
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(parameters.values())
    adapter = _lora_parameters(model, config)
    heads = int(inner.num_attention_heads)
    head_size = int(getattr(inner, "head_dim", None) or inner.hidden_size // heads)
    kv_heads = int(getattr(inner, "num_key_value_heads", None) or heads)
    layers = int(inner.num_hidden_layers)
    return ModelShape(
        num_parameters=total + adapter * (2 if config.lora is not None and changes_base(config.lora) else 1),
        num_trainable=adapter if config.lora is not None else total,
        head_parameters=sum(count for name, count in parameters.items() if name.startswith("lm_head")),
        num_layers=layers,
        hidden_size=int(inner.hidden_size),
        feed_forward_size=int(getattr(inner, "intermediate_size", None) or 4 * inner.hidden_size),
        vocabulary=int(inner.vocab_size),
        kv_values_per_token=2 * layers * kv_heads * head_size,
        quantized=_quantized(model, config),
    )


def _quantized(model: Any, config: ModelConfig) -> Quantized:
    if config.quantize is None:
        return Quantized()
    sizes = quantized_sizes(model, config.quantize)
    weights = [count for count, _ in sizes]
    return Quantized(sum(weights), sum(num_bytes for _, num_bytes in sizes), max(weights, default=0))


def _lora_parameters(model: nn.Module, config: ModelConfig) -> int:
    from torch import nn

    lora = config.lora
    if lora is None:
        return 0
    return sum(
        lora.r * (module.in_features + module.out_features) + lora.dora * module.out_features
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not name.startswith("lm_head")
        and (lora.target_modules is None or name.rpartition(".")[2] in lora.target_modules)
    )
