"""Adapters that start inside the base weights (PiSSA, OLoRA): the start policy, and conversion to plain LoRA.

Such an initialization takes the adapter's product out of the base weights. The model with the adapter off is therefore
not the start policy. A frozen copy of the adapter, named `START`, stays in the model and restores it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.sections import LoraConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn

START = "start"
"""Name of the frozen adapter with which the model is the start policy."""
_TRAINED = "default"
"""PEFT's name of the trained adapter."""


def changes_base(options: LoraConfig) -> bool:
    """Whether the adapter's initialization changes the base weights.

    Args:
        options: the `model.lora` section.

    Example:
        >>> changes_base(LoraConfig(init="pissa")), changes_base(LoraConfig(init="gaussian"))
        (True, False)
    """
    return options.init.startswith(("pissa", "olora"))


def add_start_adapter(model: PeftModel) -> None:
    """Add the frozen copy of a new adapter.

    Args:
        model: model whose adapter was just initialized, and is not sharded.
    """
    config = copy.deepcopy(model.peft_config[_TRAINED])
    config.init_lora_weights = False  # type: ignore[attr-defined]  # of PEFT's LoRA config
    model.add_adapter(START, config)
    state = model.state_dict()
    for name, tensor in state.items():
        if f".{START}." in name:
            tensor.copy_(state[name.replace(f".{START}.", f".{_TRAINED}.")])


@contextmanager
def start_adapter_active(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes as the start policy.

    Args:
        model: model with a start adapter.

    Yields:
        Nothing. The trained adapter is active again afterwards.
    """
    layers: list[Any] = [module for module in model.modules() if START in getattr(module, "lora_A", ())]
    for layer in layers:
        layer.set_adapter(START, inference_mode=True)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_adapter(_TRAINED)


def save_converted_adapter(model: PeftModel, weights: dict[str, Tensor], path: Path) -> None:
    """Write the difference to the start policy as a plain LoRA adapter of twice the rank, by PEFT's conversion.

    Args:
        model: model with a start adapter.
        weights: full state of `model`, by name.
        path: folder to write.
    """
    inner = {name.removeprefix("base_model."): tensor for name, tensor in weights.items()}
    tuner: Any = model.base_model
    converted = tuner.subtract_mutated_init(_trained_state(model, weights), START, {"state_dict": inner})
    config: Any = copy.deepcopy(model.peft_config[_TRAINED])
    config.lora_alpha *= math.sqrt(2) if config.use_rslora else 2
    config.r *= 2
    _write(config, converted, path)


def save_factors(model: PeftModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Write the trained adapter as it is, for a program that has the frozen weights of this model, not of its folder.

    Args:
        model: model wrapped in PEFT adapters.
        weights: at least the tensors of the adapters, by name.
        path: folder to write.
    """
    _write(copy.deepcopy(model.peft_config[_TRAINED]), _trained_state(model, weights), path)


def _trained_state(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from peft.utils import get_peft_model_state_dict

    state: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=weights, adapter_name=_TRAINED, save_embedding_layers=False
    )
    return state


def _write(config: Any, tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    config.init_lora_weights, config.inference_mode = True, True
    path.mkdir(parents=True, exist_ok=True)
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(path))
