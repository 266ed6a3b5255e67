"""PEFT LoRA adapters: add them to a model, merge them into its weights, save them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import UserInputError

from .adapter_start import START, add_start_adapter, changes_base, save_converted_adapter
from .peft_warnings import silence_peft
from .quantized import dequantized, quantized_owner

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

    An initialization that changes the base weights (PiSSA, OLoRA) gets a frozen copy of the adapter, named `START`,
    with which the model computes as before.

    Args:
        model: the loaded model, on the CPU.
        options: the `model.lora` section.
        seed: seed of the adapter's weights.
        task_type: PEFT's name of the task.

    Returns:
        The PEFT model.

    Raises:
        UserInputError: the target modules include embeddings, or the rank is above that of a weight.
    """
    import torch

    silence_peft()
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers.pytorch_utils import Conv1D

    config = PeftConfig(
        task_type=task_type,
        r=options.r,
        # If unset, peft warns about every such layer.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft only multiplies by it
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        use_dora=options.dora,
        init_lora_weights=True if options.init == "default" else options.init,  # type: ignore[arg-type]  # pissa_niter_N
        target_modules=list(options.target_modules) if options.target_modules else "all-linear",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
        if changes_base(options):
            _check_rank(adapted, options)
            add_start_adapter(adapted)
    if any("lora_embedding_" in name for name, _ in adapted.named_parameters()):
        raise UserInputError(
            "adapters on embedding layers are not supported",
            where="model.lora.target_modules",
            hint="list linear layers only, or set it to null for all of them",
        )
    return adapted  # type: ignore[return-value]


def _check_rank(adapted: nn.Module, options: LoraConfig) -> None:
    """Raise `UserInputError` if a weight has fewer singular values or columns than the adapter's rank."""
    least = min(each.shape[0] for name, each in adapted.named_parameters() if ".lora_A." in name)
    if least < options.r:
        raise UserInputError(
            f"{options.init} takes the factors out of weights, the smallest of which has rank {least}, not {options.r}",
            where="model.lora.r",
            hint=f"set r: {least} or less, or init: default",
        )


def merged_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the base model's weights with every adapter merged once, under the base model's names.

    `model` is not changed. PEFT merges in float32, since 16-bit sums would lose most of their digits. Quantized weights
    are returned in float32.

    Args:
        model: model, which may be wrapped in PEFT adapters.
        weights: full state of `model`, or a part of it that holds all tensors of each adapted layer, by name.
    """
    return dict(plain_weights(model, weights.items(), weights))


def plain_weights(
    model: nn.Module,
    items: Iterable[tuple[str, torch.Tensor]],
    adapters: Mapping[str, torch.Tensor],
    *,
    merge: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over weights as `merged_weights` returns them, one at a time.

    Args:
        model: model, which may be wrapped in PEFT adapters.
        items: names and tensors of the full state of `model`.
        adapters: all tensors of the adapters, by name.
        merge: False leaves the adapters out.

    Yields:
        Names of the base model, and tensors.
    """
    from .merge import merged_weight

    modules = dict(model.named_modules())
    prefix = "base_model.model."
    for name, tensor in items:
        if ".modules_to_save." in name:  # fully trained, replaces `original_module`
            module_name, _, rest = name.partition(".modules_to_save.")
            adapter, _, leaf = rest.partition(".")
            if adapter != START:
                yield f"{module_name}.{leaf}".removeprefix(prefix), tensor
        if "lora_" in name or "modules_to_save" in name or ".original_module." in name:
            continue
        if (quantized := quantized_owner(modules, name)) is not None:
            if name == f"{quantized}.weight":
                tensor = dequantized(modules[quantized]).to(tensor.device)
            elif name != f"{quantized}.bias":
                continue  # scales, which belong to the weight
        module_name, _, leaf = name.rpartition(".")
        owner = module_name.removesuffix(".base_layer")
        layer = modules.get(owner)
        if layer is not None and hasattr(layer, "lora_A") and leaf == "weight" and merge:
            tensor = merged_weight(layer, owner, tensor, adapters)
        yield f"{owner}.{leaf}".removeprefix(prefix), tensor


def save_adapter(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write a LoRA adapter as a folder that PEFT can load onto the start policy.

    With an initialization that changed the base weights, PEFT converts it to an adapter of twice the rank.

    Args:
        model: model wrapped in PEFT adapters.
        weights: full state of `model`, by name.
        path: folder to write.
    """
    peft_model = cast("PeftModel", model)
    if START in peft_model.peft_config:
        save_converted_adapter(peft_model, weights, path)
        return
    peft_model.save_pretrained(str(path), state_dict=weights, save_embedding_layers=False)
    (path / "README.md").unlink(missing_ok=True)  # a model card template
