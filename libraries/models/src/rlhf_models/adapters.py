"""PEFT LoRA adapters: add them to a model, merge them into its weights, save them."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import UserInputError

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


def is_lora(model: nn.Module) -> bool:
    """Whether a model is wrapped in PEFT adapters.

    Args:
        model: any module.

    Example:
        >>> from torch import nn
        >>> is_lora(nn.Linear(2, 2))
        False
    """
    return hasattr(model, "disable_adapter") and hasattr(model, "peft_config")


def new_adapter(model: PreTrainedModel, options: LoraConfig, seed: int, task_type: str) -> PreTrainedModel:
    """Wrap the model in a new PEFT adapter, initialized from `seed`.

    Raises `UserInputError` if the target modules include embeddings.
    """
    import torch

    silence_peft()
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers.pytorch_utils import Conv1D

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(
            model,
            PeftConfig(
                task_type=task_type,
                r=options.r,
                # If unset, peft warns about every such layer.
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
                lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft only divides it by r
                lora_dropout=options.dropout,
                target_modules=list(options.target_modules) if options.target_modules else "all-linear",
            ),
        )
    if any("lora_embedding_" in name for name, _ in adapted.named_parameters()):
        raise UserInputError(
            "adapters on embedding layers are not supported",
            where="model.lora.target_modules",
            hint="list linear layers only, or set it to null for all of them",
        )
    return adapted  # type: ignore[return-value]


def merged_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the base model's weights with every LoRA increment added once, under the base model's names.

    `model` is not changed. Increments are added in float32, since 16-bit sums would lose most of their digits.

    Args:
        model: model wrapped in PEFT adapters.
        weights: full state of `model`, or a part of it that holds both factors of each adapted weight, by name.
    """
    from peft.tuners.lora import LoraLayer

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    prefix = "base_model.model."
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".modules_to_save." in name:  # fully trained, replaces `original_module`
            module_name, _, rest = name.partition(".modules_to_save.")
            merged[f"{module_name}.{rest.partition('.')[2]}".removeprefix(prefix)] = tensor
        if "lora_" in name or "modules_to_save" in name or ".original_module." in name:
            continue
        module_name, _, leaf = name.rpartition(".")
        owner = module_name.removesuffix(".base_layer")
        layer = layers.get(owner)
        if layer is not None and leaf == "weight":
            for adapter in layer.active_adapters:
                down = weights[f"{owner}.lora_A.{adapter}.weight"].float()
                up = weights[f"{owner}.lora_B.{adapter}.weight"].float()
                increment = (up @ down) * layer.scaling[adapter]
                if getattr(layer, "fan_in_fan_out", False):
                    increment = increment.T
                tensor = tensor.float() + increment
        merged[f"{owner}.{leaf}".removeprefix(prefix)] = tensor
    return merged


def save_adapter(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write a LoRA adapter as a folder that PEFT can load.

    Args:
        model: model wrapped in PEFT adapters.
        weights: full state of `model`, by name.
        path: folder to write.
    """
    cast("PeftModel", model).save_pretrained(str(path), state_dict=weights, save_embedding_layers=False)
    (path / "README.md").unlink(missing_ok=True)  # a model card template


def silence_peft() -> None:
    """Suppress warnings about the implementation of peft, which users of this framework cannot change.

    They are bitsandbytes' about missing kernels, which we never use, and transformers' about a property that peft 0.21
    still reads, and transformers 5.23 renamed.
    """
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
